"""Model cards: names from files stay text."""

from __future__ import annotations

from dataclasses import replace

from pipeline.exporting.card import write_card
from support.small_models import build
from support.subjects import subject_of

HOSTILE = "a [b](javascript:alert) ![c](http://x/y.png) <script>d</script> | e"


def test_names_cannot_become_links_pictures_or_html() -> None:
    """Guards against a card that runs or loads something when somebody opens a stranger's model: run, classes, data set and config come
    from files."""
    subject = subject_of(build("deit"), "deit_t", 32, 3)
    description = replace(subject.description, class_names=[HOSTILE] * 3)
    config = {"model": {"name": "x\n```\n<script>d</script>\n"}}
    training = replace(subject.training, run=HOSTILE, data={"name": HOSTILE, "samples": 3, "fingerprint": "0"}, config=config)
    text = write_card(replace(subject, description=description, training=training), {"Size": HOSTILE}, "x = 1", 3, None)
    outside, fenced = text.split("````yaml\n", 1)
    assert outside.count("&lt;script>") == 5 and "<script" not in outside
    assert outside.count("](") == outside.count("\\](") == 10  # a link and a picture in each
    assert "````\n\n</details>" in fenced and "\n````" not in fenced.split("````\n\n</details>")[0].removesuffix("\n")
