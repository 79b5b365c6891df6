from __future__ import annotations

from html.parser import HTMLParser

from sitsopt.reporting import Report
from sitsopt.rewrite.record import GraphRecord, Record

from .records import miss, record

VOID = {"meta", "br", "link", "img", "input"}


class Checker(HTMLParser):
    """Tags must nest, and nothing may be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"}.intersection(name for name, _ in attrs), (tag, attrs)
        self.seen.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(report: Report) -> tuple[str, Checker]:
    html, checker = report.html(), Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert "http" not in html
    assert "url(" not in html
    return html, checker


def test_page_is_whole_and_alone() -> None:
    html, checker = page(Report(record(), {"fuse/rope": "Rotary."}, bandwidth_gbs=3350.0))
    for part in ("llama,int4", "h100", "3350 GB/s", "model.layers.{0,1}.mlp", "the kernel loads whole vectors",
                 "quantized caches are not built yet", "prefill 1.0 MB"):  # fmt: skip
        assert part in " ".join(checker.text.split()), part
    assert checker.seen.count("details") >= 2
    assert html.count("rgba(var(--heat)") == 8  # two rules in two layers of two graphs


def test_page_of_nothing() -> None:
    _, checker = page(Report(Record(), recorded=False))
    assert "No rule fired." in checker.text
    assert "They were not recorded." in checker.text


def test_text_of_a_record_is_escaped() -> None:
    odd = Record("<script>", "r", [GraphRecord("g", fallback="<b>")])
    odd.graphs[0].misses.append(miss("fuse/x", "<i>", "n", found="<u>"))
    _, checker = page(Report(odd))
    assert not {"script", "b", "i", "u"}.intersection(checker.seen)
