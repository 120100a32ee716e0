"""`torchrec-tpu plan`: what it prints, its JSON, and its page in a browser."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from torchrec_tpu.cli import main
from torchrec_tpu.plan_page import page
from torchrec_tpu.sharding.cost import Way
from torchrec_tpu.sharding.plan import SparseCorePlan, size

RECIPE = ["--recipe", "dlrm_v2"]
SMALL = [*RECIPE, "--max-rows", "20000", "--topology", "tpu7x:2x2x2", "--global-batch", "4096"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with plan.json and plan.html."""
    folder = tmp_path_factory.mktemp("plan")
    files = ["--json", str(folder / "plan.json"), "--html", str(folder / "plan.html")]
    assert main(["plan", *SMALL, "--replicas", *files]) == 0
    return folder


@pytest.fixture(scope="module")
def plan(written: Path) -> SparseCorePlan:
    return SparseCorePlan.load(written / "plan.json")


# ----------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(("batch", "hbm"), [(65_536, 3_991_768_320), (135_168, 4_424_500_000)])
def test_mlperfs_dlrm_v2_on_32_v7x_chips(batch: int, hbm: int) -> None:
    """What the planner is for; `hbm` is what libtpu 0.0.52 takes for the baseline (docs/aot.md)."""
    from torchrec_tpu.planning import plan_recipe
    from torchrec_tpu.recipes import dlrm_v2_mlperf

    plan = plan_recipe(dlrm_v2_mlperf(), "tpu7x:4x4x2", global_batch_size=batch)
    assert plan.num_chips == 32
    assert len(plan.tables) == 26
    assert plan.all_rows.hbm_bytes == pytest.approx(hbm, rel=0.10)
    assert plan.cost.exchanged_bytes * 3 <= plan.all_rows.exchanged_bytes
    assert plan.cost.bound_ms * 2 < plan.all_rows.bound_ms
    assert plan.cost.hbm_bytes < plan.hbm_bytes
    assert {planned.chosen.way for planned in plan.tables} == {Way.ROWS, Way.POOLED}
    assert plan["t_C21"].chosen.way is Way.POOLED  # 100 ids a bag


# ------------------------------------------------------------------------------------ command line


def test_it_prints_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--explain", "t_C21"]) == 0
    printed = capsys.readouterr().out
    assert "tpu7x:2x2x2 (mesh): 8 chips, 16 devices of 2 SparseCores" in printed
    assert re.search(r"\nt_C21 +20,000 +128 +100 +pooled, ", printed)
    assert "t_C21 (20,000, 128) in model.sparse_arch.embedding_bag_collection: pooled" in printed
    assert "<- runner-up" in printed


def test_all_mod_is_the_baseline(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", *SMALL, "--all-mod", "--json", str(path)]) == 0
    plan = SparseCorePlan.load(path)
    assert {planned.chosen.way for planned in plan.tables} == {Way.ROWS}
    assert plan.cost.exchanged_bytes == plan.all_rows.exchanged_bytes


def test_a_torus_has_more_links_than_a_mesh(tmp_path: Path) -> None:
    bounds = []
    for flag in ([], ["--torus"]):
        path = tmp_path / "plan.json"
        command = ["plan", *RECIPE, "--max-rows", "20000", "--topology", "tpu7x:4x4x4"]
        batch = ["--global-batch", "8192", "--all-mod"]
        assert main([*command, *batch, *flag, "--json", str(path)]) == 0
        bounds.append(SparseCorePlan.load(path).cost.links_ms)
    assert bounds[1] < bounds[0]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--topology", "tpu7x:32", "--global-batch", "4096"], 2, "sides"),
        (["--topology", "tpu7x:2x2x2", "--global-batch", "4097"], 1, "does not divide"),
        (["--topology", "v6e:2x2", "--global-batch", "4096"], 1, "'t_C1' 41.0 GB"),
        (
            [*SMALL[2:], "--json", "/no/such/folder/plan.json"],
            2,
            "--json /no/such/folder/plan.json: there is no such folder",
        ),
        ([*SMALL[2:], "--explain", "absent"], 2, "'absent' names 0 tables"),
    ],
)
def test_what_cannot_be_is_said_and_shown_in_the_exit_code(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *RECIPE, *arguments]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--topology": "tpu7x:2x2x1"}, "the plan is for tpu7x:2x2x2 and a global batch of 4096"),
        ({"--global-batch": "8192"}, "not for tpu7x:2x2x2 and 8192"),
        ({"--max-rows": "1000"}, "the plan is for other tables"),
        ({}, "the plan replicates tables ['t_C"),
    ],
)
def test_a_program_follows_no_plan_that_was_made_for_something_else(
    change: dict[str, str], message: str, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = dict(zip(SMALL[::2], SMALL[1::2], strict=True)) | change
    flat = [word for pair in arguments.items() for word in pair]
    assert main(["aot", *flat, "--plan", str(written / "plan.json")]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_plan_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    assert main(["aot", *SMALL, "--plan", str(path)]) == 2
    assert "not a torchrec_tpu plan" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------- page


class Elements(HTMLParser):
    """Tags with their attributes, and the text of the innermost open element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[int] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        if tag not in ("meta", "link", "rect", "br"):
            self._open.append(len(self.found) - 1)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self.found[self._open.pop()][0] != tag:
            continue

    def handle_data(self, data: str) -> None:
        if self._open:
            self.found[self._open[-1]][2].append(data)


def assert_numbers_are_those_of(plan: SparseCorePlan, text: str) -> None:
    """Values and their printed forms, in a page's source or in a browser's DOM."""
    elements = Elements(text).found
    cards = {
        a["id"]: (a["value"], "".join(t)) for tag, a, t in elements if "id" in a and tag == "data"
    }
    assert float(cards["hbm-bytes"][0]) == plan.cost.hbm_bytes
    assert cards["hbm-bytes"][1] == size(plan.cost.hbm_bytes)
    assert float(cards["exchanged-bytes"][0]) == plan.cost.exchanged_bytes
    assert cards["exchanged-bytes"][1] == size(plan.cost.exchanged_bytes)
    assert float(cards["bound-ms"][0]) == plan.cost.bound_ms
    assert cards["bound-ms"][1] == f"{plan.cost.bound_ms:.3f} ms"

    def values(of: str) -> list[float]:
        return [float(a["value"] or "") for tag, a, _ in elements if a.get("class") == of]

    devices = plan.cost.devices
    assert values("hbm") == [sum(device.hbm_bytes.values()) for device in devices]
    assert values("ici") == [sum(device.ici_bytes.values()) for device in devices]
    assert values("time") == pytest.approx(
        [
            sum(ms for cause, ms in device.time_ms.items() if cause.startswith(resource))
            for device in devices
            for resource in ("SparseCore", "links", "TensorCore")
        ]
    )
    moved = [
        float(a["value"] or "")
        for tag, a, _ in elements
        if tag == "data" and "id" not in a and "class" not in a
    ]
    assert moved == [
        option.exchanged_bytes
        for planned in plan.tables
        for option in (planned.chosen, planned.runner_up)
        if option is not None
    ]
    names = [a["data-table"] for _, a, _ in elements if "data-table" in a]
    assert names == [planned.table for planned in plan.tables]


def test_the_page_has_the_numbers_of_the_json(written: Path, plan: SparseCorePlan) -> None:
    assert_numbers_are_those_of(plan, (written / "plan.html").read_text())


def test_the_page_needs_nothing_from_elsewhere(written: Path) -> None:
    text = (written / "plan.html").read_text()
    assert not re.search(r"https?://|src=|@import|url\(", text)
    links = [a for tag, a, _ in Elements(text).found if tag in ("link", "script", "img", "iframe")]
    assert links == [{"rel": "icon", "href": "data:,"}]


def test_names_from_a_model_are_text_and_no_markup(plan: SparseCorePlan) -> None:
    document = json.loads(plan.to_json())
    document["tables"][0]["table"] = document["tables"][0]["placement"]["table"] = "<b>&\"'"
    elements = Elements(page(SparseCorePlan.from_json(json.dumps(document)))).found
    assert elements  # parsed at all
    assert "<b>&\"'" in [a["data-table"] for _, a, _ in elements if "data-table" in a]


# ----------------------------------------------------------------------------------------- browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

PROBE = """
<script>
const errors = [];
addEventListener("error", event => errors.push(event.message));
addEventListener("load", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  const wide = document.documentElement.clientWidth;
  const name = e => e.tagName + "." + e.getAttribute("class") + " " + e.textContent.slice(0, 40);
  const out = [...document.querySelectorAll("main *")].filter(e =>
    e.getBoundingClientRect().right > wide + 0.5 || e.getBoundingClientRect().left < -0.5 ||
    (e instanceof HTMLElement && getComputedStyle(e).display != "inline" &&
     e.scrollWidth > e.clientWidth + 1));
  const bars = [...document.querySelectorAll("svg")].map(svg => {
    const box = svg.getBoundingClientRect();
    return {width: box.width, height: box.height, bars: svg.querySelectorAll("g").length};
  });
  parent.postMessage({
    dom: document.documentElement.outerHTML, errors, wide: innerWidth,
    document: document.documentElement.scrollWidth, out: out.map(name), bars,
    background: getComputedStyle(document.body).backgroundColor,
    text: getComputedStyle(document.body).color,
  }, "*");
});
</script>
"""
"""Added to the page: tells the frame around it what it has become."""

FRAME = """<!doctype html><meta name="color-scheme" content="light dark"><body>
<script>
addEventListener("message", event => document.body.dataset.seen = JSON.stringify(event.data));
</script>
<iframe src="page.html" width="%d" height="1000" style="border: 0"></iframe>
"""
"""Chromium's own window cannot be as narrow as a telephone."""


@dataclass(frozen=True)
class Seen:
    """What a browser made of the page."""

    dom: str
    log: str
    probe: dict[str, Any]


@pytest.fixture(scope="module")
def browse(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], Seen]:
    """(width, dark) -> the page in headless Chromium, all details open."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    folder = tmp_path_factory.mktemp("browser")
    text = (written / "plan.html").read_text()
    (folder / "page.html").write_text(text.replace("</body>", PROBE + "</body>"))

    def run(width: int, dark: bool) -> Seen:
        frame = folder / "frame.html"
        frame.write_text(FRAME % width)
        done = subprocess.run(
            [
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-background-networking",
                "--disable-dev-shm-usage",
                "--enable-logging=stderr",
                f"--user-data-dir={folder / 'profile'}",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                "--window-size=1400,1100",
                "--hide-scrollbars",
                "--virtual-time-budget=5000",
                "--dump-dom",
                frame.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=200,
            check=True,
        )
        body = next(a for tag, a, _ in Elements(done.stdout).found if tag == "body")
        probe = json.loads(body["data-seen"] or "")
        return Seen(dom=probe.pop("dom"), log=done.stderr, probe=probe)

    return run


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_all_of_it(
    width: int, browse: Callable[[int, bool], Seen], plan: SparseCorePlan
) -> None:
    seen = browse(width, False)
    assert "CONSOLE" not in seen.log
    assert seen.probe["errors"] == []
    assert seen.probe["wide"] == width
    assert seen.probe["document"] == width
    assert seen.probe["out"] == []
    assert len(seen.probe["bars"]) == 5
    for chart in seen.probe["bars"]:
        assert chart["bars"] == plan.num_devices
        assert chart["width"] > 150
        assert chart["height"] > 100
    assert_numbers_are_those_of(plan, seen.dom)


def test_a_dark_desktop_gets_a_dark_page(browse: Callable[[int, bool], Seen]) -> None:
    def brightness(colour: str) -> float:
        return sum(map(float, re.findall(r"\d+", colour)[:3])) / 3

    light, dark = browse(1280, False).probe, browse(1280, True).probe
    assert brightness(light["background"]) > 200 > 60 > brightness(light["text"])
    assert brightness(dark["background"]) < 60 < 200 < brightness(dark["text"])
