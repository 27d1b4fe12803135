"""A plan for notebooks: the drawing of its graph with what the plan adds, and the tables of `plan_table`."""

from __future__ import annotations

from rich.table import Table

from .drawing.graph import graph_html
from .drawing.tables import parts_html
from .plan_table import plan_table
from .runtime.plan import Plan


def plan_html(plan: Plan) -> str:
    """Draws a plan.

    Args:
        plan: which devices, axes and micro-batches each section gets.

    Returns:
        HTML: the graph, with devices and parameters in the boxes and the shape of rows at the arrows, above the tables.
    """
    parts = plan_table(plan)
    rows = {label: f"{edge.row.dtype}[{','.join(map(str, edge.row.shape))}]" for label, edge in plan.edges.items()}
    return graph_html(plan.graph, rows, _facts(plan, parts)) + parts_html(parts)


def _facts(plan: Plan, parts: list[Table | str]) -> dict[str, list[str]]:
    """Section -> its devices and its parameters, in the words of the tables."""
    cells = {str(c.header): list(map(str, c.cells)) for part in parts if isinstance(part, Table) for c in part.columns}
    facts = {}
    for number, name in enumerate(plan.sections):
        counts = {kind: cells[f"{kind} parameters"][number] for kind in ("trained", "frozen")}
        words = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count != "-")
        facts[name] = [f"devices {cells['devices'][number]}", f"parameters {words or 'none'}"]
    return facts
