"""Writes the generated files of a checkout: `python -m services.operations`, from its root."""

from __future__ import annotations

import json
from pathlib import Path

from services.operations.alerts import rules_file
from services.operations.chart import CHART, chart_files
from services.operations.dashboards import DASHBOARDS
from services.operations.metrics_page import metrics_page


def generated(root: Path) -> dict[Path, str]:
    """Every generated file and what it should hold."""
    boards = {
        root / CHART / "dashboards" / f"{name}.json": json.dumps(board, indent=1) + "\n"
        for name, board in DASHBOARDS.items()
    }
    rules = {root / CHART / "rules" / "dspark.yaml": rules_file()}
    return {**chart_files(root), **boards, **rules, root / "docs" / "metrics.md": metrics_page()}


def main() -> None:
    for path, text in generated(Path.cwd()).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
