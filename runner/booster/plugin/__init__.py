"""How a model is spread over ranks: one file a plugin."""

from runner.booster.plugin.base import Plugin
from runner.booster.plugin.ddp import TorchDDPPlugin
from runner.booster.plugin.fsdp import TorchFSDPPlugin
from runner.booster.plugin.single import SinglePlugin

__all__ = ["Plugin", "SinglePlugin", "TorchDDPPlugin", "TorchFSDPPlugin"]
