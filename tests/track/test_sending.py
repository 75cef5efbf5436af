"""``pipeline.track`` without a client: what is read, noted and sent, whatever fails in between."""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image

from pipeline.errors import UserError
from pipeline.track.position import EVENTS, PICTURE, ROWS, GrowingRows, Mark, Position
from pipeline.track.sending import Sender
from pipeline.track.tracker import About, Item, Picture, Point, Segment
from support.growing_run import GrowingRun, rows_back


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)  # hundreds of position files


class Killed(BaseException):
    """As a SIGKILL: nothing may be done after it."""


class Store:
    """A tracker that keeps segments in memory, and loses the newest items when the sender fails, as clients with a queue do."""

    target = "the store"

    def __init__(self, chance: random.Random | None = None) -> None:
        self.kept: dict[str, list[Item]] = {}
        self.ends: dict[str, str] = {}
        self.about: About | None = None
        self._chance, self._segment = chance, ""

    def _may_fail(self) -> None:
        if self._chance and self._chance.random() < 0.25:
            items = self.kept.get(self._segment, [])
            del items[len(items) - self._chance.randint(0, min(len(items), 40)) :]
            raise Killed if self._chance.random() < 0.5 else ConnectionError("no route to host")

    def open(self, segment: Segment, about: About, sent: int) -> int:
        self._segment, self.about = segment.id, about
        segment.place = segment.id
        self.kept.setdefault(segment.id, [])
        self._may_fail()
        return min(len(self.kept[segment.id]), sent)

    def send(self, first: int, items: Sequence[Item]) -> None:
        assert first == len(self.kept[self._segment]), "a gap, or items that arrive twice"
        for item in items:
            self.kept[self._segment].append(item)
            if isinstance(item, Picture):
                self._may_fail()
        self._may_fail()

    def describe(self, about: About) -> None:
        self.about = about

    def close(self, state: str) -> None:
        self.ends[self._segment] = state

    def newest(self) -> list[Item]:
        return self.kept[max(self.kept, key=lambda id: int(id.partition("-")[2] or 1))]


def sender(run: GrowingRun, store: Store, folder: Path) -> Sender:
    return Sender(run.folder, "run", store, Position(run.folder, "store", store.target, folder), 0.01, sleep=lambda _: None)


def arrived(items: list[Item]) -> list[dict]:
    return rows_back((item.step, item.time, item.values) for item in items if isinstance(item, Point))


def is_whole(run: GrowingRun, items: list[Item]) -> bool:
    """Whether a segment has every row, event and picture once."""
    keys = [item.key for item in items if isinstance(item, Picture)]
    events = [item for item in items if isinstance(item, Point) and any(name.startswith("events/") for name in item.values)]
    steps = range(10, run.step + 1, 10)
    return (
        arrived(items) == run.rows
        and sorted(keys) == sorted(f"train/images@{step}" for step in steps)
        and len(events) == run.events
    )


def test_a_run_arrives_whole(tmp_path: Path) -> None:
    """Guards against rows that are left out at the borders of calls, and numbers that change on the way."""
    run, store = GrowingRun(tmp_path / "run", last_step=1300), Store()
    run.start()
    run.end()
    each = sender(run, store, tmp_path / "state")
    each.run()
    (items,) = store.kept.values()
    assert is_whole(run, items) and list(store.ends.values()) == ["complete"]
    loss = [item.values.get("train/loss") for item in items if isinstance(item, Point) and item.step == 7]
    assert loss == [None], "a loss that was not finite has no value"
    picture = next(item for item in items if isinstance(item, Picture))
    assert Image.open(io.BytesIO(picture.png)).size == (32, 24)
    assert store.about and store.about.config["model"]["name"] == "pervit_t" and "events.jsonl" in store.about.texts


@pytest.mark.parametrize("seed", range(12))
def test_kills_failures_and_rewinds_in_any_order(seed: int, tmp_path: Path) -> None:
    """Guards against an item that arrives twice or never: after a kill between noting and sending, a client that loses what it had
    accepted, and a resume that rewinds the run while nobody sends it."""
    chance = random.Random(seed)
    run, store = GrowingRun(tmp_path / "run", last_step=120), Store(random.Random(seed + 1))
    run.start()
    for _ in range(6):
        run.train(min(run.last_step - 1, run.step + chance.randint(1, 30)))
        _send_until_one_lives(run, store, tmp_path / "state", rounds=chance.randint(0, 3))
        if chance.random() < 0.5:
            run.start(step=chance.randrange(0, run.step + 1, 5))
    run.end()
    _send_until_one_lives(run, store, tmp_path / "state", rounds=None)
    assert is_whole(run, store.newest())
    assert [end for end in store.ends.values()][-1] == "complete"


def _send_until_one_lives(run: GrowingRun, store: Store, folder: Path, rounds: int | None) -> None:
    """Start senders, of which some are killed; ``None``: until one has seen the end."""
    for _ in range(500):
        each = sender(run, store, folder)
        try:
            if rounds is None:
                each.run()
            for _ in range(rounds or 0):
                each.round()
            return
        except (Killed, ConnectionError):
            continue
        finally:
            each.position.release()
    raise AssertionError("no sender has come to its end")


def test_a_rewind_is_seen_while_sending(tmp_path: Path) -> None:
    """Guards against curves that go back and forth, and pictures of steps that were repeated."""
    run, store = GrowingRun(tmp_path / "run"), Store()
    run.start()
    run.train(37)
    each = sender(run, store, tmp_path / "state")
    while each.round():
        pass
    run.start(step=20)
    run.train(45)
    while each.round():
        pass
    first, second = store.kept.values()
    assert is_whole(run, second) and len(arrived(first)) == 37 + 3 * 3
    assert store.ends[each.position.segment.earlier[0]] == "superseded" and each.position.segment.number == 2
    run.start(step=45)  # a stop with a checkpoint of the last step rewinds nothing
    run.end()
    each.run()
    assert len(store.kept) == 2 and is_whole(run, store.newest())


def test_a_copy_that_is_renewed_is_no_rewind(tmp_path: Path) -> None:
    """Guards against a new segment for each rsync, which writes another file of the same content and more."""
    run, copy, store = GrowingRun(tmp_path / "there"), tmp_path / "run", Store()
    run.start()
    for until in (10, 20, 30):
        run.train(until)
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run.folder, copy)
        if until == 10:
            each = sender(GrowingRun(copy), store, tmp_path / "state")
        while each.round():
            pass
    (items,) = store.kept.values()
    assert is_whole(run, items)


def test_another_run_in_the_folder_is_another_run(tmp_path: Path) -> None:
    """Guards against a second training that continues the first one's curves, or is taken for a rewind of it."""
    store, folder = Store(), tmp_path / "run"
    for begun in ("2027-01-15", "2027-01-16"):
        run = GrowingRun(folder)
        run.start()
        (folder / "environment.json").write_text(json.dumps([{"started": begun}]))
        run.end()
        each = sender(run, store, tmp_path / "state")
        each.run()
        each.position.release()
        assert each.position.segment.number == 1
        assert is_whole(run, store.kept[each.position.segment.id])
        shutil.rmtree(folder)
    assert len(store.kept) == 2


def test_damage_costs_only_itself(tmp_path: Path) -> None:
    """Guards against a sender that ends at half a row, or counts it."""
    path = tmp_path / "metrics.jsonl"
    rows = GrowingRows(path)
    assert rows.begins_with(Mark()) and rows.take(5) == []
    path.write_bytes(b'{"step": 1, "time": 5}\n\xff\n[1]\n{"step": "2", "time": 1}\n{"step": 2, "time": 6}\n{"step": 3, "ti')
    assert [row["step"] for row in rows.take(5)] == [1, 2] and rows.unreadable == 3
    mark = rows.mark
    with open(path, "ab") as file:
        file.write(b'me": 7}\n')
    assert [row["step"] for row in rows.take(5)] == [3] and GrowingRows(path).begins_with(mark)
    path.write_bytes(path.read_bytes().replace(b'"time": 6', b'"time": 8'))
    assert not GrowingRows(path).begins_with(mark)


def test_positions_are_cut_to_what_has_arrived(tmp_path: Path) -> None:
    """Guards against a note that says more, or less, than the tracker."""
    position = Position(tmp_path / "run", "store", "a", tmp_path)
    for kind, value in ((ROWS, 5), (ROWS, 3), (PICTURE, "a@1"), (EVENTS, 2), (ROWS, 4)):
        position.note(kind, value)
    assert (position.sent, position.count(ROWS), position.count(EVENTS), position.pictures) == (15, 12, 2, {"a@1"})
    position.save()
    position.release()
    again = Position(tmp_path / "run", "store", "a", tmp_path)
    assert again.sent == 15 and again.segment == position.segment
    for count, expected in ((12, (10 - 1, 2, {"a@1"})), (9, (8, 0, {"a@1"})), (8, (8, 0, set())), (0, (0, 0, set()))):
        again.cut(count)
        if count == 12:
            assert (again.count(ROWS), again.count(EVENTS)) == (9, 2)
        else:
            assert (again.count(ROWS), again.count(EVENTS), again.pictures) == expected


def test_a_note_that_cannot_be_written(tmp_path: Path) -> None:
    """Guards against the sentence of a training about checkpoints that a sender has not."""
    (tmp_path / "state").touch()
    with pytest.raises(
        UserError, match=r"state/pervit-track/run-mlflow-\w+.json cannot be written \(Not a directory\).* XDG_STATE_HOME"
    ):
        Position(tmp_path / "run", "mlflow", "x", tmp_path / "state" / "pervit-track")


def test_once_gives_up_with_a_sentence(tmp_path: Path) -> None:
    """Guards against a command in a script that tries for ever, and against a traceback of a client's."""
    run, store = GrowingRun(tmp_path / "run"), Store()
    run.start()
    run.train(5)

    def refuse(*_: object) -> None:
        raise ConnectionError("no route to host\nmore lines")

    store.send = refuse  # type: ignore[method-assign]
    with pytest.raises(UserError, match="^the store could not be reached .no route to host.: the same command continues"):
        sender(run, store, tmp_path / "state").run(once=True)
