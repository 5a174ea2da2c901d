"""Writes the generated files of a checkout: `python -m services.operations`, from its root."""

from __future__ import annotations

from pathlib import Path

from services.operations.chart import chart_files


def generated(root: Path) -> dict[Path, str]:
    return chart_files(root)


def main() -> None:
    for path, text in generated(Path.cwd()).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
