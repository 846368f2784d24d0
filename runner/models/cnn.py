"""A small convolutional network for 8x8 digits."""

from collections.abc import Callable

from torch import Tensor, nn

PIXEL_MEAN = 0.305
PIXEL_STD = 0.376
"""Mean and standard deviation of all pixels of scikit-learn's digits, scaled to [0, 1]."""


class DigitsCNN(nn.Module):
    """Three 3x3 convolutions with ReLU, 2x2 max pooling after the last two, and a linear head."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(2 * width * 2 * 2, num_classes)
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def pipeline(self) -> list[tuple[tuple[str, ...], Callable[[Tensor], Tensor]]]:
        """Return `forward` as a chain of parts: the modules that each uses, and its function."""
        rest = [((f"features.{i}",), layer) for i, layer in enumerate(self.features)]
        return [(("features.0",), self._enter), *rest[1:], (("head",), self.head)]

    def _enter(self, images: Tensor) -> Tensor:
        hidden: Tensor = self.features[0]((images - PIXEL_MEAN) / PIXEL_STD)
        return hidden

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float [B, 1, 8, 8] in [0, 1], to logits, [B, num_classes]."""
        logits: Tensor = self.head(self.features((images - PIXEL_MEAN) / PIXEL_STD))
        return logits
