"""constraints.txt has an exact pin for each package that the project needs, as the tests run."""

import tomllib
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.pins import PINS, ROOT


def test_every_package_is_pinned_at_the_version_that_is_installed():
    lines = PINS.read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    pins = {canonicalize_name(name): version for name, version in pairs}
    assert len(pins) == len(pairs)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    listed = [*project["dependencies"], *(line for extra in extras for line in extra)]
    for dependency in map(Requirement, listed):
        assert dependency.specifier.contains(pins[canonicalize_name(dependency.name)]), dependency
        bounded = any(specifier.operator == "<" for specifier in dependency.specifier)
        assert bounded or dependency.name.startswith("types-"), f"{dependency}: no upper bound"
    # What these need in turn, as far as it is installed.
    waiting = [(Requirement(line), "") for line in listed]
    seen = set()
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        assert name in pins, name
        for further in {"", *requirement.extras} - {
            extra for pinned, extra in seen if pinned == name
        }:
            seen.add((name, further))
            try:
                installed = distribution(name)
            except PackageNotFoundError:  # an extra that is not installed
                continue
            assert installed.version == pins[name], name
            waiting += [(Requirement(line), further) for line in installed.requires or ()]
    assert len({name for name, _ in seen}) > 100


def test_commands_that_install_use_the_pins():
    for file in ("README.md", "CONTRIBUTING.md"):
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            if "pip install" in line and "--no-deps" not in line:
                assert "-c constraints.txt" in line, line
