"""The line of an exception, as the terminal and the status of a run show it."""

from runner.launch.failure import KNOBS, is_lost_peer, summary_of


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_a_summary_is_one_line_of_all_that_an_error_holds():
    error = ExceptionGroup("two loaders", [ValueError("one"), KeyError("two")])
    error.add_note("in\nepoch 3")
    error.__cause__ = OSError("disk")
    line = "ExceptionGroup: two loaders (2 sub-exceptions): ValueError: one, KeyError: 'two'"
    assert summary_of(error) == f"{line}; in epoch 3; from OSError: disk"


def test_an_exception_whose_text_cannot_be_read_is_named_by_its_class():
    assert summary_of(Mute()) == "tests.launch.test_summaries.Mute: <its text cannot be read>"
    assert not is_lost_peer(Mute())


def test_a_line_ends_with_advice_if_memory_is_short():
    error = ValueError("in a stage")
    error.__cause__ = RuntimeError("can't allocate memory\n\nmany lines")
    line = "ValueError: in a stage; from RuntimeError: can't allocate memory"
    assert summary_of(error) == f"{line}; {KNOBS}"
