from __future__ import annotations

from runner.report.markup import Markup, tag


def test_text_is_escaped_and_markup_is_not() -> None:
    made = tag("p", "<b>&\"'", tag("i", "<"), Markup("<hr>"), None, 3)
    assert made == "<p>&lt;b&gt;&amp;&quot;&#x27;<i>&lt;</i><hr>3</p>"


def test_attributes_are_escaped_named_and_left_out() -> None:
    made = tag("td", class_="a", data_key='"><x>', hidden=True, title=None, open=False, x=1.5001)
    assert made == '<td class="a" data-key="&quot;&gt;&lt;x&gt;" hidden x="1.5"></td>'


def test_void_elements_are_not_closed() -> None:
    assert tag("meta", name="a") == '<meta name="a">'
