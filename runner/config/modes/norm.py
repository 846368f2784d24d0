"""Description of mode ``norm``."""

from dataclasses import dataclass

from runner.config.modes.mode import Mode, ModeInfo


@dataclass(eq=False)
class Norm(Mode):
    """The whole gradient is scaled down to a norm of at most the threshold."""

    info = ModeInfo(
        clips="steps",
        stat="‖G‖",
        unit="‖G‖",
        note="Dashed: the threshold of the same colour; norms above it are scaled down to it.",
        published=(
            (0.1, "Compressive Transformer (Rae 2019), gated convolutional LM (Dauphin 2016)"),
            (0.25, "AWD-LSTM (Merity 2017), CTRL (Keskar 2019)"),
            (1.0, "GPT-3 (Brown 2020), LLaMA (Touvron 2023), TaBERT (Yin 2020)"),
            (2.0, "Inception v3 (Szegedy 2015)"),
        ),
        sources=("Pascanu, Mikolov and Bengio 2013, arXiv 1211.5063, algorithm 1",),
    )


MODE = Norm
