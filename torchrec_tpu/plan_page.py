"""A plan as one HTML page without external resources: bars per device, tables with reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from string import Template
from typing import Final

from torchrec_tpu.sharding.cost import CONSTANTS, DeviceCost, Option
from torchrec_tpu.sharding.plan import PlannedTable, SparseCorePlan, size

_RESOURCES: Final[Mapping[str, str]] = {
    "SparseCore": "SparseCore",
    "links": "Links",
    "TensorCore": "TensorCore",
}

_COLOURS: Final[Mapping[str, int]] = {
    "pooled padding": 9,
    "temporaries": 8,
    "code": 2,
    "pooled ids": 3,
    "vectors": 4,
    "vector gradients": 5,
    "replica gradients": 6,
    "dense gradients": 7,
    "all-reduce": 7,
}
"""Colour of a cause; of others, their position."""

Amounts = Sequence[Mapping[str, float]]
"""Of each device, by cause."""


def page(plan: SparseCorePlan) -> str:
    """The page. Every number that matters is also a `data-value` attribute, unrounded."""
    return _PAGE.substitute(
        title=escape(f"Plan for {plan.topology}, global batch {plan.global_batch_size:,}"),
        style=_STYLE,
        topology=escape(plan.topology),
        subtitle=escape(
            f"{plan.slice} · global batch {plan.global_batch_size:,} · {len(plan.tables)} tables"
        ),
        cards="\n".join(_cards(plan)),
        memory_and_links="\n".join(_memory_and_links(plan)),
        times="\n".join(_times(plan)),
        tables="\n".join(map(_table_row, plan.tables)),
        layout="\n".join(_layout(plan)),
        devices="\n".join(_device_row(i, device) for i, device in enumerate(plan.cost.devices)),
        assumptions="\n".join(f"<li>{escape(text)}</li>" for text in plan.assumptions),
        constants="\n".join(_constants()),
    )


# ------------------------------------------------------------------------------------------- cards


def _cards(plan: SparseCorePlan) -> Iterator[str]:
    cost, base = plan.cost, plan.all_rows
    yield _card(
        "hbm",
        "HBM of the fullest device",
        _number("hbm-bytes", cost.hbm_bytes, size(cost.hbm_bytes)),
        f"{cost.hbm_bytes / plan.hbm_bytes:.1%} of {size(plan.hbm_bytes)}",
        [("this plan", cost.hbm_bytes), ("a device has", plan.hbm_bytes)],
        size,
    )
    times = base.exchanged_bytes / cost.exchanged_bytes if cost.exchanged_bytes else 1.0
    yield _card(
        "ici",
        "Bytes between chips, a step",
        _number("exchanged-bytes", cost.exchanged_bytes, size(cost.exchanged_bytes)),
        f"{_number('saving', times, f'{times:.2f}')} times fewer than all row-sharded"
        if times > 1
        else "every table is row-sharded",
        [("this plan", cost.exchanged_bytes), ("all row-sharded", base.exchanged_bytes)],
        size,
    )
    yield _card(
        "time",
        "A step takes at least",
        _number("bound-ms", cost.bound_ms, f"{cost.bound_ms:.3f} ms"),
        f"bound by {escape(cost.bound_by)}; published figures, never calibrated"
        + (
            f"; not in it: {cost.unbounded_ms:.1f} ms of TensorCore time (compiler's estimate) for "
            "pooled updates on buffers of static size"
            if cost.unbounded_ms
            else ""
        ),
        [("this plan", cost.bound_ms), ("all row-sharded", base.bound_ms)],
        lambda ms: f"{ms:.3f} ms",
    )


def _card(
    name: str,
    title: str,
    value: str,
    note: str,
    bars: Sequence[tuple[str, float]],
    form: Callable[[float], str],
) -> str:
    longest = max(amount for _, amount in bars) or 1
    lines = "".join(
        f'<div class="versus"><span>{escape(label)}</span>'
        f'<i class="{"mine" if at == 0 else "other"}" style="--w:{amount / longest:.4f}"></i>'
        f"<b>{escape(form(amount))}</b></div>"
        for at, (label, amount) in enumerate(bars)
    )
    return (
        f'<section class="card" id="card-{name}"><h2>{escape(title)}</h2>'
        f'<p class="big">{value}</p><p class="note">{note}</p>{lines}</section>'
    )


def _number(name: str, value: float, text: str) -> str:
    return f'<data id="{name}" value="{value!r}">{escape(text)}</data>'


# ------------------------------------------------------------------------------------------ charts


def _memory_and_links(plan: SparseCorePlan) -> Iterator[str]:
    devices = plan.cost.devices
    yield _chart(
        "hbm",
        "HBM by cause",
        "All devices run one program and reserve the same; padding is what one has to spare.",
        [device.hbm_bytes for device in devices],
        size,
    )
    yield _chart(
        "ici",
        "Bytes over links to other chips by cause",
        "Of one step, sent and received. A device receives the ids of the columns that it owns.",
        [device.ici_bytes for device in devices],
        size,
    )


def _times(plan: SparseCorePlan) -> Iterator[str]:
    devices = plan.cost.devices
    tallest = max(
        sum(t for cause, t in device.time_ms.items() if cause.startswith(resource))
        for device in devices
        for resource in _RESOURCES
    )
    for resource, title in _RESOURCES.items():
        yield _chart(
            f"time-{resource.lower()}",
            f"Time: {title}",
            "Lower bound. The three resources work at once; one scale.",
            [
                {
                    cause.removeprefix(f"{resource}: "): amount
                    for cause, amount in device.time_ms.items()
                    if cause.startswith(resource)
                }
                for device in devices
            ],
            lambda ms: f"{ms:.3f} ms",
            tallest=tallest,
        )


def _chart(
    name: str,
    title: str,
    note: str,
    amounts: Amounts,
    form: Callable[[float], str],
    *,
    tallest: float | None = None,
) -> str:
    """One stacked bar a device, and a legend with the largest amount of each cause."""
    causes = [cause for cause in amounts[0] if any(of[cause] for of in amounts)]
    top = tallest or max(sum(of.values()) for of in amounts) or 1
    wide = max(1, 640 // len(amounts))
    colours = {cause: _COLOURS.get(cause, at) for at, cause in enumerate(amounts[0])}
    bars = []
    for device, of in enumerate(amounts):
        height = 0.0
        tip = f"device {device}: {form(sum(of.values()))}" + "".join(
            f"\n{cause}: {form(of[cause])}" for cause in causes if of[cause]
        )
        rectangles = []
        for cause in causes:
            tall = 100 * of[cause] / top
            rectangles.append(
                f'<rect class="c{colours[cause]}" x="{device * wide}" '
                f'y="{100 - height - tall:.3f}" '
                f'width="{wide - (1 if wide > 3 else 0)}" height="{tall:.3f}"/>'
            )
            height += tall
        bars.append(f"<g><title>{escape(tip)}</title>{''.join(rectangles)}</g>")
    legend = "".join(
        f'<li><i class="c{colours[cause]}"></i>{escape(cause)} '
        f"<b>{_range(amounts, cause, form)}</b></li>"
        for cause in causes
    )
    sums = [sum(of.values()) for of in amounts]
    return (
        f'<section class="chart" id="chart-{name}"><h2>{escape(title)}</h2>'
        f'<p class="note">{escape(note)}</p>'
        f'<div class="plot"><div class="axis"><span>{escape(form(top))}</span>'
        f"<span>{escape(form(top / 2))}</span><span>0</span></div>"
        f'<svg viewBox="0 0 {wide * len(amounts)} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(title)}: {escape(form(min(sums)))} to {escape(form(max(sums)))} a '
        f'device">{"".join(bars)}</svg></div>'
        f'<p class="ends"><span>device 0</span><span>device {len(amounts) - 1}</span></p>'
        f'<ul class="legend">{legend}</ul></section>'
    )


def _range(amounts: Amounts, cause: str, form: Callable[[float], str]) -> str:
    low, high = (pick(of[cause] for of in amounts) for pick in (min, max))
    return escape(form(high) if low == high else f"{form(low)} – {form(high)}")


# ------------------------------------------------------------------------------------------ tables


def _table_row(planned: PlannedTable) -> str:
    considered = "".join(
        f"<li>{escape(option.label)}: {escape(size(option.exchanged_bytes))}, links "
        f"{option.links_ms:.4f} ms, SparseCore {option.sparsecore_ms:.4f} ms, HBM "
        f"{escape(size(option.hbm_bytes))}</li>"
        for option in sorted(planned.considered, key=lambda option: option.sum_ms)
    ) + "".join(f"<li>not possible: {escape(text)}</li>" for text in planned.excluded)
    shape = f"{planned.num_embeddings:,} × {planned.embedding_dim}"
    return (
        f'<tr data-table="{escape(planned.table)}">'
        + _cell("table", f"<b>{escape(planned.table)}</b><small>{shape}</small>")
        + _cell("ids", f"{planned.ids_per_sample:g}", number=True)
        + _cell("placement", _chip(planned.chosen))
        + _cell("a step", _moved(planned.chosen), number=True)
        + _cell("runner-up", _chip(planned.runner_up) if planned.runner_up else "–")
        + _cell("a step", _moved(planned.runner_up) if planned.runner_up else "", number=True)
        + _cell(
            "why",
            f"<div>{escape(planned.reason)}<details><summary>all ways</summary>"
            f"<ul>{considered}</ul></details></div>",
        )
        + "</tr>"
    )


def _chip(option: Option) -> str:
    return f'<span class="way {option.way}">{escape(option.label)}</span>'


def _moved(option: Option) -> str:
    return f'<data value="{option.exchanged_bytes!r}">{size(option.exchanged_bytes)}</data>'


def _cell(label: str, content: str, *, number: bool = False) -> str:
    kind = ' class="number"' if number else ""
    return f'<td data-label="{escape(label)}"{kind}>{content}</td>'


def _layout(plan: SparseCorePlan) -> Iterator[str]:
    for stack in plan.stacks:
        limits = stack.capacity
        yield (
            f"<li>stack <b>{escape(stack.name)}</b>: {len(stack.tables)} row-sharded tables; "
            f"limits of a partition: {limits.max_ids:,} ids, {limits.max_unique_ids:,} distinct "
            "rows</li>"
        )
    for group in plan.groups:
        yield (
            f"<li>pooled, <b>{group.width} columns</b>: {group.num_shards} shards, "
            f"{group.num_slots} slot{'s' if group.num_slots > 1 else ''} on each device</li>"
        )


def _device_row(index: int, device: DeviceCost) -> str:
    hbm, ici = sum(device.hbm_bytes.values()), sum(device.ici_bytes.values())
    resources = [
        sum(t for cause, t in device.time_ms.items() if cause.startswith(resource))
        for resource in _RESOURCES
    ]
    return (
        f'<tr data-device="{index}">'
        + _cell("device", str(index), number=True)
        + _cell("HBM", f'<data class="hbm" value="{hbm}">{size(hbm)}</data>', number=True)
        + _cell("links", f'<data class="ici" value="{ici}">{size(ici)}</data>', number=True)
        + "".join(
            _cell(
                f"{title} ms",
                f'<data class="time" value="{ms!r}">{ms:.4f}</data>',
                number=True,
            )
            for title, ms in zip(_RESOURCES.values(), resources, strict=True)
        )
        + "</tr>"
    )


def _constants() -> Iterator[str]:
    for name, constant in CONSTANTS.items():
        yield (
            "<tr>"
            + _cell("constant", escape(name.replace("_", " ")))
            + _cell("value", f"{constant.value:g} {escape(constant.unit)}", number=True)
            + _cell("origin", constant.origin)
            + _cell("source", escape(constant.source))
            + "</tr>"
        )


# -------------------------------------------------------------------------------------------- page

_STYLE: Final = """
:root { color-scheme: light dark; --bg: #f7f7f5; --card: #fff; --ink: #1d2126; --dim: #667079;
  --line: #e3e4e0; --mine: #2f6fde; --other: #b9bfc6;
  --c0: #2f6fde; --c1: #14a38b; --c2: #9a6b5b; --c3: #e0a100; --c4: #8757d6; --c5: #d9534f;
  --c6: #4bb4e6; --c7: #7a8a3c; --c8: #e58a3c; --c9: #c9ced4;
  --rows: #dfe9fb; --pooled: #d5f1ec; --replicated: #f9ecc9; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --card: #1d2125; --ink: #e8eaec;
  --dim: #9aa4ad; --line: #30363c; --mine: #6ea2ff; --other: #59626b;
  --c0: #6ea2ff; --c1: #3fcbb2; --c2: #c79a8b; --c3: #f0c04a; --c4: #b18cf2; --c5: #f0837f;
  --c6: #7fd0f5; --c7: #b3c46a; --c8: #f5ab6b; --c9: #454c53;
  --rows: #22365c; --pooled: #17443d; --replicated: #4c3d12; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; letter-spacing: -.01em; }
h2 { font-size: 15px; margin: 0; font-weight: 600; }
p { margin: 0; }
.note, small, .ends, header p { color: var(--dim); }
.note { font-size: 13px; }
header { margin-bottom: 24px; }
.grid { display: grid; gap: 16px; grid-template-columns: repeat(3, minmax(0, 1fr)); }
.two { grid-template-columns: repeat(2, minmax(0, 1fr)); margin-top: 16px; }
.times { margin-top: 16px; }
.card, .chart, .block { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; padding: 16px 18px; min-width: 0; }
.block { margin-top: 16px; }
.big { font-size: 30px; font-weight: 650; letter-spacing: -.02em; margin: 2px 0; }
.versus { display: grid; grid-template-columns: 104px minmax(0, 1fr) 70px; gap: 10px;
  align-items: center; font-size: 12.5px; color: var(--dim); margin-top: 8px; }
.versus i { height: 8px; border-radius: 4px; width: max(2px, calc(100% * var(--w))); }
.versus b { font-weight: 600; color: var(--ink); text-align: right; white-space: nowrap; }
.mine { background: var(--mine); } .other { background: var(--other); }
.plot { display: grid; grid-template-columns: 68px minmax(0, 1fr); gap: 8px; margin-top: 10px; }
.plot svg { width: 100%; height: 150px; display: block; border-bottom: 1px solid var(--line);
  background: repeating-linear-gradient(to top, transparent 0 74px, var(--line) 74px 75px); }
.axis { display: flex; flex-direction: column; justify-content: space-between; text-align: right;
  font-size: 11.5px; color: var(--dim); font-variant-numeric: tabular-nums; white-space: nowrap; }
.ends { display: flex; justify-content: space-between; font-size: 11.5px; padding-left: 76px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 0;
  margin: 8px 0 0; font-size: 12.5px; color: var(--dim); }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px;
  margin-right: 6px; }
.legend b { color: var(--ink); font-weight: 600; }
.c0 { fill: var(--c0); background: var(--c0); } .c1 { fill: var(--c1); background: var(--c1); }
.c2 { fill: var(--c2); background: var(--c2); } .c3 { fill: var(--c3); background: var(--c3); }
.c4 { fill: var(--c4); background: var(--c4); } .c5 { fill: var(--c5); background: var(--c5); }
.c6 { fill: var(--c6); background: var(--c6); } .c7 { fill: var(--c7); background: var(--c7); }
.c8 { fill: var(--c8); background: var(--c8); } .c9 { fill: var(--c9); background: var(--c9); }
table { width: 100%; border-collapse: collapse; font-size: 13.5px; margin-top: 8px; }
th { text-align: left; font-size: 12px; font-weight: 600; color: var(--dim); }
th, td { padding: 7px 10px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; }
tr:last-child td { border-bottom: 0; }
td small { display: block; font-size: 12px; white-space: nowrap; }
#placements td:nth-child(7) { width: 34%; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.way { display: inline-block; padding: 1px 8px; border-radius: 9px; font-size: 12.5px;
  white-space: nowrap; }
.rows { background: var(--rows); } .pooled { background: var(--pooled); }
.replicated { background: var(--replicated); }
details { margin-top: 4px; } summary { cursor: pointer; color: var(--dim); font-size: 12.5px; }
details ul, .block > ul { margin: 6px 0 0; padding-left: 18px; font-size: 13px; }
details.block > summary { font-size: 15px; color: var(--ink); font-weight: 600; }
@media (max-width: 820px) {
  main { padding: 20px 14px 48px; }
  .grid, .two { grid-template-columns: minmax(0, 1fr); }
  thead { display: none; }
  table, tbody, tr, td { display: block; width: 100%; }
  tr { border-bottom: 1px solid var(--line); padding: 10px 0; }
  td { border: 0; padding: 2px 0; display: grid; gap: 10px;
    grid-template-columns: 86px minmax(0, 1fr); text-align: left; }
  td::before { content: attr(data-label); color: var(--dim); font-size: 12px; }
  td > * { grid-column: 2; justify-self: start; }
  #placements td:nth-child(7) { width: 100%; }
  #placements td:nth-child(4)::before, #placements td:nth-child(6)::before { content: ""; }
  td.number { text-align: left; white-space: normal; }
}
"""

_PAGE: Final = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<link rel="icon" href="data:,">
<style>$style</style>
</head>
<body>
<main>
<header><h1>$topology</h1><p>$subtitle</p></header>
<div class="grid">
$cards
</div>
<div class="grid two">
$memory_and_links
</div>
<div class="grid times">
$times
</div>
<section class="block" id="placements"><h2>Placement of every table</h2>
<table>
<thead><tr><th>table</th><th class="number">ids a sample</th><th>placement</th>
<th class="number">a step</th><th>runner-up</th><th class="number">a step</th><th>why</th></tr>
</thead>
<tbody>
$tables
</tbody>
</table>
</section>
<section class="block" id="layout"><h2>Stacks and slots</h2>
<ul>
$layout
</ul>
</section>
<details class="block" id="devices"><summary>Every device in numbers</summary>
<table>
<thead><tr><th class="number">device</th><th class="number">HBM</th><th class="number">links</th>
<th class="number">SparseCore ms</th><th class="number">links ms</th>
<th class="number">TensorCore ms</th></tr></thead>
<tbody>
$devices
</tbody>
</table>
</details>
<details class="block" id="basis"><summary>What the figures rest on</summary>
<ul>
$assumptions
</ul>
<table>
<thead><tr><th>constant</th><th class="number">value</th><th>origin</th><th>source</th></tr></thead>
<tbody>
$constants
</tbody>
</table>
</details>
</main>
</body>
</html>
""")
