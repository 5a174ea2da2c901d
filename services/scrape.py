"""A page of /metrics read back: sums over what is not asked for, and what rose between two pages. Knows no metric by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """series: name -> labels -> value. Histograms are their `_bucket`, `_sum` and `_count`."""

    series: Mapping[str, Mapping[Labels, float]]

    def value(self, name: str, **labels: str) -> float:
        """The sum of the series with these labels; 0 where there is none."""
        wanted = labels.items()
        return sum(number for have, number in self.series.get(name, {}).items() if wanted <= dict(have).items())

    def by(self, name: str, label: str) -> dict[str, float]:
        """Value of the label -> sum of its series."""
        sums: defaultdict[str, float] = defaultdict(float)
        for have, number in self.series.get(name, {}).items():
            sums[dict(have).get(label, "")] += number
        return dict(sums)

    def label(self, name: str, label: str) -> str:
        """Of the first series that is not 0: what an info metric says; empty where none is."""
        return next((dict(have).get(label, "") for have, n in self.series.get(name, {}).items() if n), "")

    def where(self, label: str, value: str) -> Scrape:
        """Without the series that have another value of this label; those that do not have it at all are kept."""
        return Scrape(
            {
                name: {labels: number for labels, number in each.items() if dict(labels).get(label, value) == value}
                for name, each in self.series.items()
            }
        )

    def since(self, before: Scrape) -> Scrape:
        """What each series rose by. One that fell began anew, as when its process was replaced: all of it has risen since."""
        return Scrape(
            {
                name: {
                    labels: number - old if number >= (old := before.series.get(name, {}).get(labels, 0.0)) else number
                    for labels, number in each.items()
                }
                for name, each in self.series.items()
            }
        )


def parse_page(text: str) -> Scrape:
    """Raises ValueError for what is no page of metrics."""
    series: defaultdict[str, dict[Labels, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series[sample.name][frozenset(sample.labels.items())] = sample.value
    return Scrape(dict(series))
