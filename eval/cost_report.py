"""The costs of a scenario as plain text: amounts, money, break-even volumes, notes."""

from collections.abc import Mapping, Sequence
from typing import Any

from eval.labels import CHECKPOINT_NAMES, SYSTEM_NAMES, width_label
from eval.tables import Column, table

Json = Mapping[str, Any]

_MARKS = {"measured": "m", "given": "g", "derived": "d", "measured + derived": "m+d"}
_LEGEND = (
    "m: measured; g: given in the scenario; d: counted from operations and bytes; "
    "m+d: measured, with something counted"
)
_NOT_COUNTED = (
    "machine time is paid while a query waits for its first token, one at a time; retrieval with "
    "its vectors and decoding are not counted; F1 counts as equal without regard to its interval"
)


def render_cost(result: Json) -> str:
    """The result of `eval.cost.cost` as text: amounts, money, break-even volumes, notes."""
    chosen = [one["chosen"] for one in result["systems"] if one["chosen"]]
    setting = result["setting"]
    corpus = setting["corpus"]
    head = (
        f"{result['scenario']}: {corpus['passages']:,} passages of "
        f"{corpus['tokens_a_passage']:,.0f} tokens, "
        f"{100 * corpus['changed_share_a_month']:g}% changed a month; "
        f"{result['queries_a_month']:,.0f} queries a month for {setting['months']} months\n"
        f"{goal_text(result)}"
    )
    parts = [head]
    if chosen:
        parts.append(f"a query, and what has to be made ({_LEGEND})\n{table(chosen, _AMOUNTS)}")
        parts.append(f"USD\n{table(chosen, _money(setting['months']), left=1)}")
    out = [one for one in result["systems"] if one["not_eligible"]]
    parts.append("\n".join(f"{SYSTEM_NAMES[o['system']]}: {o['not_eligible']}" for o in out))
    parts.append("\n".join(_pairs(result["break_even"])))
    parts.append("\n".join(f"note: {note}" for note in _notes(result)))
    return "\n\n".join(part for part in parts if part)


def goal_text(result: Json) -> str:
    """The target F1 with its origin, and the latency budget."""
    target, budget = result["target_f1"], result["p99_budget_ms"]
    if target is None and not any(one["eligible"] for one in result["systems"]):
        text = "no cell is within the latency budget"
    elif target is None:
        text = "no F1 is known: costs alone are compared"
    else:
        origin = "given" if target["source"] == "given" else "what every system reaches"
        text = f"F1 of at least {target['value']:.1f} ({origin})"
    return f"{text}; " + ("no latency budget" if budget is None else f"P99 within {budget:g} ms")


def _marked(figure: Json | None, digits: int = 1, scale: float = 1.0) -> str:
    if figure is None:
        return "unknown"
    if not figure["value"]:
        return "-"
    return f"{figure['value'] * scale:,.{digits}f} {_MARKS[figure['source']]}"


def _system(one: Json) -> str:
    return SYSTEM_NAMES[one["cell"]["system"]]


_AMOUNTS: list[Column] = [
    ("system", _system),
    ("k_c/k", lambda one: width_label(one["cell"])),
    ("weights", lambda one: CHECKPOINT_NAMES[one["cell"]["checkpoint"]]),
    ("F1", lambda one: _marked(one["cell"]["f1"])),
    ("P99 ms", lambda one: _marked(one["cell"]["p99_ms"])),
    ("mean ms", lambda one: _marked(one["cell"]["mean_ms"])),
    ("MB read", lambda one: _marked(one["cell"]["bytes_read"], 1, 1e-6)),
    ("disk GB", lambda one: _marked(one["disk_gb"])),
    ("encoding h", lambda one: _marked(one["encoding_hours"], 2)),
    ("fine-tuning h", lambda one: _marked(one["fine_tuning_hours"])),
    ("busy h a month", lambda one: f"{one['machine_hours_a_month']:,.1f}"),
]


def _money(months: int) -> list[Column]:
    def usd(name: str, factor: float = 1.0) -> Any:
        return lambda one: f"{one[name] * factor:,.2f}"

    return [
        ("system", _system),
        ("once: nuggets", usd("extraction_once_usd")),
        ("encoding", usd("encoding_once_usd")),
        ("fine-tuning", usd("fine_tuning_once_usd")),
        (f"a month: once/{months}", lambda one: f"{_once(one) / months:,.2f}"),
        ("changes", usd("changes_usd_a_month")),
        ("new models", usd("models_usd_a_month")),
        ("disk", usd("disk_usd_a_month")),
        ("queries", usd("queries_usd_a_month")),
        ("total", usd("total_usd_a_month")),
        ("1,000 queries", lambda one: f"{1e3 * one['line']['usd_a_query']:,.4f}"),
    ]


def _once(one: Json) -> float:
    kinds = ("extraction", "encoding", "fine_tuning")
    return sum(float(one[f"{kind}_once_usd"]) for kind in kinds)


def _pairs(pairs: Sequence[Json]) -> list[str]:
    """Break-even volumes of Standard RAG and of CoinRAG with all others, or of all without them."""
    main = [pair for pair in pairs if {"standard_rag", "coinrag"} & set(pair["systems"])]
    shown = main or pairs
    lines = [
        f"{' and '.join(SYSTEM_NAMES[name] for name in pair['systems'])}: "
        f"{_break_even(pair['cheaper'])}"
        for pair in shown
    ]
    more = len(pairs) - len(shown)
    return [*lines, f"{more} more pairs: --json"] if more else lines


def _break_even(cheaper: Sequence[Json]) -> str:
    """Who is cheaper at first, and from which volume on who else."""
    first, *later = [
        f"{SYSTEM_NAMES[part['system']]} is cheaper" if part["system"] else "both cost the same"
        for part in cheaper
    ]
    if not later:
        return f"{first} at any volume"
    volumes = [volume_text(part["from_queries_a_month"]) for part in cheaper[1:]]
    steps = [f"from {v} queries a month {what}" for v, what in zip(volumes, later, strict=True)]
    return "; ".join([f"{first} at first", *steps])


def volume_text(queries: float) -> str:
    """Three digits of a number of queries: amounts are not known better."""
    return f"{float(f'{queries:.3g}'):,g}" if queries < 1000 else f"{float(f'{queries:.3g}'):,.0f}"


def _notes(result: Json) -> list[str]:
    notes = [_NOT_COUNTED]
    chosen = [one["chosen"] for one in result["systems"] if one["chosen"]]
    if unknown := [_system(one) for one in chosen if one["cell"]["f1"] is None]:
        notes.append(f"F1 not known, taken to reach the target: {', '.join(unknown)}")
    if mean := [_system(one) for one in chosen if one["cell"]["p99_ms"]["source"] == "derived"]:
        notes.append(f"P99 not known, the mean stands for it: {', '.join(mean)}")
    sources = {one["cell"]["mean_ms"]["source"] for one in chosen}
    if "derived" in sources and len(sources) > 1:
        notes.append(
            "a counted time holds operations, bytes and the scenario's overhead_ms, and nothing of "
            "what else a measured one holds"
        )
    if sum(one["cell"]["checkpoint"] == "fine_tuned" for one in chosen) > 1:
        notes.append("each fine-tuned system pays for a fine-tuning of its own")
    for field, what in (("too_slow", "above the latency budget"), ("below_target", "below the F1")):
        if out := [one for one in result["systems"] if one[field]]:
            counts = [f"{SYSTEM_NAMES[o['system']]} {o[field]} of {o['cells']}" for o in out]
            notes.append(f"cells {what}: {', '.join(counts)}")
    if result["measured"]:
        files = ", ".join(result["measured"])
        notes.append(f"measured on {result['hardware']}: {files}")
        counts = sorted({one["cell"]["questions"] for one in chosen})
        if len(counts) > 1:
            notes.append(
                f"F1 is of {counts[0]} to {counts[-1]} questions: only of the same ones it compares"
            )
    if result["arm_cells_left_out"]:
        notes.append(f"cells of arms, left out: {result['arm_cells_left_out']}")
    return notes
