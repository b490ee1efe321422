"""The page: opened in a real browser, at desktop and phone width, in light and dark; hovered, and printed."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from platon.report.command import command
from platon.report.page import page
from platon.report.reader import read_runs
from platon.report.report import make_report
from platon.report.writer import write_report

Make = Callable[..., Any]
TIP = "[...document.querySelectorAll('.tip')].filter((tip) => !tip.hidden).map((tip) => tip.innerText).join('|')"


@pytest.fixture(scope="module")
def file(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("page") / "out" / "page.html"
    write_report(make_report(read_runs(study)), target.parent, figures=False, html=target)
    return target


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_draws_without_a_complaint(width: int, dark: bool, file: Path, browser: Any) -> None:
    browser.open(file, width, dark=dark)
    assert browser.complaints() == []
    count = "[card.dataset.chart, card.querySelectorAll('svg path, svg .violin, svg .cell').length]"
    cards = "[...document.querySelectorAll('[data-chart]')]"
    drawn = browser.run(f"Object.fromEntries({cards}.map((card) => {count}))")
    kinds = {name.split("-")[0] for name in drawn}
    assert kinds == {"ratio", "beta1", "training", "churn", "cdf", "violins", "layers"}
    assert all(count > 0 for count in drawn.values())
    assert drawn["violins-rte"] == 24
    # Nothing makes the page wider than the screen: wide tables scroll by themselves.
    assert browser.run("document.documentElement.scrollWidth") <= width
    light = browser.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert light < 60 if dark else light > 200


def test_hovering_shows_the_value(file: Path, browser: Any) -> None:
    """At the right end of the curves stand the means at 20 %: 68.0 ± 2.6 for PLATON, 66.0 for magnitude."""
    browser.open(file)
    assert browser.run(TIP) == ""
    browser.hover("[data-chart='ratio-rte'] svg", across=0.95)
    said = browser.run(TIP)
    assert said.startswith("weights kept 20")
    assert "PLATON: 68 ± 2.6" in said
    assert "Magnitude: 66 ± 2.6" in said
    assert "Dense: 71 ± 1" in said
    browser.hover("[data-chart='ratio-rte'] svg", across=0.2)
    assert "PLATON: 61.5 ± 1.8" in browser.run(TIP)
    browser.hover("h1")
    assert browser.run(TIP) == ""
    browser.hover("[data-chart^='layers'] .cell")
    assert re.fullmatch(r"layer \d, \S+\s+step 10: [\d.]+ % kept", browser.run(TIP))
    browser.hover("[data-chart='violins-rte'] .violin")
    assert "weight 1, |w g|" in browser.run(TIP)
    assert "decades" in browser.run(TIP)
    assert browser.complaints() == []


def test_keys_lines_and_choice(file: Path, browser: Any) -> None:
    browser.open(file)
    browser.run("document.querySelector('[data-chart=\"ratio-rte\"] svg').focus()")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
    assert browser.run(TIP).startswith("weights kept 10")
    paths = "document.querySelectorAll('[data-chart=\"ratio-rte\"] svg path').length"
    before = browser.run(paths)
    browser.run("document.querySelector('[data-chart=\"ratio-rte\"] .legend button').click()")
    assert browser.run(paths) == before - 1
    first = browser.run("document.querySelector('[data-chart^=layers]').dataset.chart")
    browser.run("(c => { c.value = 1; c.dispatchEvent(new Event('change')); })(document.querySelector('select'))")
    assert browser.run("document.querySelector('[data-chart^=layers]').dataset.chart") != first
    assert browser.complaints() == []


def test_it_prints(file: Path, browser: Any) -> None:
    browser.open(file)
    assert browser.pdf().startswith(b"%PDF")
    assert browser.run("[...document.querySelectorAll('details')].every((one) => one.open)")


def test_one_run_has_a_page_too(tmp_path: Path, make_record: Make, make_run: Make, browser: Any) -> None:
    """A run without a probe file, and with HTML in its name, settings and messages, which must be escaped."""
    odd = make_record("text", "platon", 0.2, 0, 60.0, data="</script><b>&'\"") | {"not_converged": "<i>it</i> failed"}
    make_run(tmp_path / "a <b>run", odd)
    target = tmp_path / "page.html"
    target.write_text(page(make_report(read_runs(tmp_path / "a <b>run"))), encoding="utf-8")
    browser.open(target)
    assert browser.complaints() == []
    assert browser.run("document.querySelector('h1').textContent") == "a <b>run"
    assert browser.run("document.querySelectorAll('main b, main i').length") == browser.run(
        "document.querySelectorAll('.legend i').length"
    )
    assert "N.A." in browser.run("document.querySelector('table').innerText")


class Links(HTMLParser):
    """Everything that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]


def test_it_fetches_nothing(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    links = Links()
    links.feed(text)
    assert all(link.startswith(("#", "data:")) for link in links.found)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert len(text) < 400_000


def test_the_data_are_plain_json(file: Path) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', file.read_text(encoding="utf-8"))
    assert found is not None
    data = json.loads(found[1].replace("<\\/", "</"))
    assert set(data) == {"curves", "churn", "cdf", "violins", "maps"}
    line = next(line for line in data["curves"][0]["lines"] if line["name"] == "PLATON")
    assert [point[:2] for point in line["points"]] == [[10.0, 61.5], [20.0, 68.0]]


def test_the_command_says_what_was_said(tmp_path: Path, make_record: Make, make_run: Make) -> None:
    found = make_record("rte", "platon", 0.15, 3, 60.0, data="my data", group_by_length=False, learning_rate=8e-05)
    make_run(tmp_path / "a", found | {"recipe": "paper/bert-base/rte-15"})
    make_run(tmp_path / "b", make_record("rte", "dense", 0.15, 3, 60.0))
    make_run(tmp_path / "c", make_record("rte", "l0", 0.15, 3, 60.0, penalty=125.0))
    said = {run.name: command(run) for run in read_runs(tmp_path)}
    assert said["a"] == (
        "platon prune --recipe paper/bert-base/rte-15 --task rte --method platon --keep 0.15 --seed 3 "
        "--learning-rate 8e-05 --data 'my data' --no-group-by-length"
    )
    assert said["b"] == "platon prune --task rte --method dense --keep 0.15 --seed 3"
    assert said["c"] == "platon prune --task rte --method l0 --seed 3 --penalty 125"
