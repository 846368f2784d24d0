"""Small networks for recipes and tests, and `Classifier`, which adds a loss to a network.

`conf/model/*.yaml` names them in full (`runner.models.gpt.GPT`), as it does classes of torchvision
or timm, or your own.
"""

from runner.models.classifier import Classifier
from runner.models.cnn import DigitsCNN, GatedConvLanguageModel
from runner.models.compressive import CompressiveTransformer
from runner.models.gpt import GPT, MaskedLanguageModel
from runner.models.mixture import Mixture, MixtureGPT
from runner.models.recurrent import AWDLSTM, LSTMLanguageModel, RNNLanguageModel

__all__ = [
    "AWDLSTM",
    "GPT",
    "Classifier",
    "CompressiveTransformer",
    "DigitsCNN",
    "GatedConvLanguageModel",
    "LSTMLanguageModel",
    "MaskedLanguageModel",
    "Mixture",
    "MixtureGPT",
    "RNNLanguageModel",
]
