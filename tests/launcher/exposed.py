"""What ``/metrics`` says, read as a scraper reads it."""

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


class Exposed:
    """Samples of one scrape; the text must be well formed."""

    def __init__(self, text: str) -> None:
        self.families = list(text_string_to_metric_families(text))
        self.samples = [each for family in self.families for each in family.samples]
        places = Counter((each.name, *sorted(each.labels.items())) for each in self.samples)
        assert max(places.values()) == 1, places.most_common(3)

    def find(self, name: str, **labels: str) -> list[Sample]:
        return [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]

    def one(self, name: str, **labels: str) -> float:
        (sample,) = self.find(name, **labels)
        return sample.value

    def total(self, name: str, **labels: str) -> float:
        return sum(sample.value for sample in self.find(name, **labels))

    def by(self, name: str, label: str) -> dict[str, float]:
        counts: Counter[str] = Counter()
        for sample in self.find(name):
            counts[sample.labels[label]] += sample.value
        return dict(counts)
