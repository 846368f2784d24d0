"""Every package that the project needs is pinned, at the version that the tests run with."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.pins import HASHED, PINS, ROOT


def pins(file):
    """Version and hashes of each package of a file of pins."""
    text = file.read_text(encoding="utf-8").replace("\\\n", "")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    found = {}
    for pin, *hashes in lines:
        name, version = pin.split("==")
        assert canonicalize_name(name) not in found, name
        found[canonicalize_name(name)] = (version, hashes)
    return found


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def needed():
    """The packages that the project with all its extras needs here, by name."""
    extras = project()["optional-dependencies"]
    waiting = [*project()["dependencies"], *(each for extra in extras.values() for each in extra)]
    seen, found = set(), {}
    waiting = [(Requirement(each), "") for each in waiting]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found.setdefault(name, None)
        for wanted in ("", *requirement.extras):
            if (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            try:
                held = distribution(name)
            except PackageNotFoundError:  # an extra that is not installed
                continue
            found[name] = held.version
            waiting += [(Requirement(each), wanted) for each in held.requires or ()]
    return found


def test_every_package_is_pinned_at_the_version_that_is_installed():
    pinned = pins(PINS)
    wanted = needed()
    assert len(wanted) > 100
    assert {name for name in wanted if name not in pinned} == set()
    other = {
        name: (version, pinned[name][0])
        for name, version in wanted.items()
        if version is not None and version != pinned[name][0]
    }
    assert other == {}


def test_the_hashes_are_of_the_same_versions():
    plain, hashed = pins(PINS), pins(HASHED)
    assert {name: one[0] for name, one in plain.items()} == {
        name: one[0] for name, one in hashed.items()
    }
    for name, (_, hashes) in hashed.items():
        assert hashes, name
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", one) for one in hashes), name


def test_pins_satisfy_the_project_and_each_package_has_an_upper_bound():
    pinned = pins(PINS)
    extras = project()["optional-dependencies"]
    listed = [*project()["dependencies"], *(each for extra in extras.values() for each in extra)]
    for each in map(Requirement, listed):
        assert each.specifier.contains(pinned[canonicalize_name(each.name)][0]), each
        if not each.name.startswith("types-"):
            assert any(one.operator == "<" for one in each.specifier), f"{each}: no upper bound"


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md"])
def test_commands_that_install_use_the_pins(file):
    for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
        if "pip install" in line and "--no-deps" not in line:
            assert "-c constraints.txt" in line or "--require-hashes" in line, line
