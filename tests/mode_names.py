"""Names of the clipping modes, as messages list them."""

from tests.process import ROOT

NAMES = sorted(path.stem for path in (ROOT / "conf" / "clip").glob("*.yaml"))
LISTED = ", ".join(NAMES)
