"""Collect what the ranks find, judge each node beside the others, and say in a table and a verdict which to leave out.

No rank is waited for without a limit: all put what they find into the job's store, and rank 0 takes what is there in time.
"""

import json
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from pipeline.cluster.environment import node_name, nodes_of
from pipeline.cluster.meeting import store_client
from pipeline.cluster.world import World, name_ranks
from pipeline.config import Config
from pipeline.errors import NotConnected, UserError, counted, first_few, first_line
from pipeline.health.checks import examine_rank, limited, measure_link, partner
from pipeline.loader.probe import FORMS
from pipeline.logs.console import say_once

SECONDS = 180.0  # for all of it; a third each for the meeting, for what a rank can do alone, and for the links
_SHARE = 1 / 3  # of the median of all nodes: who has less is slow, or short of memory
_LEAST_SHM = 1 / 16  # GiB: NCCL's buffers between the processes of a node
_CLOCK = 1.0  # seconds between two nodes' clocks
_SLOT = 1.5  # seconds, at least, for a link
_RATES = ("data", "cache", "output_dir", "link")
_COLUMNS = {
    "memory": "GiB free",
    "gpu_memory": "GPU GiB free",
    "shm": "GiB /dev/shm",
    **{what: f"{what} MB/s" for what in _RATES},
}
_SHOWN = 16  # of the nodes that are well; of more, the extremes and the median


@dataclass(frozen=True)
class Verdict:
    """What rank 0 has found: a page of lines for people, and the nodes to leave out; ``sick``: anything at all is wrong."""

    lines: list[str]
    leave_out: list[str]
    sick: bool


def examine(config: Config, world: World, seconds: float = SECONDS) -> Verdict:
    """Examine all nodes of a job; a rank that stops answering is named. Collective, with the same result on every rank. Raises
    NotConnected: rank 0 has stopped."""
    try:
        return _examined(config, world, seconds)
    except RuntimeError as error:  # the store's
        if world.is_main:
            raise
        problem = f"rank 0, which collects what all find, gives no answer ({first_line(error)})"
        raise NotConnected(problem, "leave its node out") from None


def _examined(config: Config, world: World, seconds: float) -> Verdict:
    names, began = world.gather(node_name()), time.monotonic()
    leaders = [names.index(name) for name in dict.fromkeys(names)]
    say_once(world, f"examining {counted(len(leaders), 'node')} with {counted(world.size, 'process')}, at most {seconds:.0f} s")
    store = store_client(seconds) if world.size > 1 else dist.HashStore()
    own = examine_rank(config, world, world.rank in leaders, 0.8 * seconds / 3)
    store.set(f"doctor/own/{world.rank}", json.dumps(own))
    reports: dict[int, Any] = {}
    if world.is_main:
        reports = _collect(store, "own", range(world.size), began + seconds / 3)
        store.set("doctor/leaders", json.dumps([rank for rank in leaders if rank in reports]))
    answering = json.loads(store.get("doctor/leaders"))
    if world.rank in answering:
        store.set(f"doctor/links/{world.rank}", json.dumps(_links(world, answering, names, seconds / 4)))
    if world.is_main:
        links = _collect(store, "links", answering, began + 2 * seconds / 3)
        verdict = judge(_by_node(names, reports, links))
        store.set("doctor/verdict", json.dumps(vars(verdict)))
        deadline = time.monotonic() + 5
        while store.add("doctor/left", 0) < len(reports) - 1 and time.monotonic() < deadline:  # this process hosts the store
            time.sleep(0.05)
        return verdict
    verdict = Verdict(**json.loads(store.get("doctor/verdict")))
    store.add("doctor/left", 1)
    return verdict


def see_that_nodes_are_fit(config: Config, world: World) -> None:
    """Examine all nodes and show it. Raises UserError: on every rank: something is wrong."""
    verdict = examine(config, world)
    for line in verdict.lines:
        say_once(world, line)
    if verdict.sick:
        again = f"submit it again with --exclude={','.join(verdict.leave_out)}"
        remedy = again if verdict.leave_out else "mend what it names"
        raise UserError("the doctor finds that this job must not train as it is, see above", remedy)


def absent(missing: Sequence[int]) -> list[str]:
    """The last lines for ranks that never came: the nodes to leave out, as far as Slurm tells where they should be."""
    nodes = ",".join(nodes_of(missing, int(os.environ["WORLD_SIZE"])))
    lines = [f"verdict: {nodes or f'the node of {name_ranks(missing)}'} to leave out"] if missing else []
    return lines + [f"--exclude={nodes}"] * bool(nodes)


def _collect(store: dist.Store, what: str, ranks: Iterable[int], deadline: float) -> dict[int, Any]:
    """What ranks have put into the store, without those from whom nothing comes in time."""
    found = {}
    for rank in ranks:
        key = f"doctor/{what}/{rank}"
        with suppress(RuntimeError):  # PyTorch's, after the time
            store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            found[rank] = json.loads(store.get(key))
    return found


def _links(world: World, leaders: list[int], names: list[str], seconds: float) -> dict[str, Any]:
    """Measure the links from this node to others, two by two: to all, or to as many as there is time for if all fail. A turn ends at
    the same time on every node, so that none waits in the next one for a partner that still waits for a third."""
    count, index = len(leaders) + len(leaders) % 2, leaders.index(world.rank)
    turns = min(count - 1, max(1, int(seconds / _SLOT)))
    found, began = dict[str, Any](), time.monotonic()
    for turn in range(turns):
        if (other := partner(index, turn, count)) < len(leaders):
            peer, left = leaders[other], began + (turn + 1) * seconds / turns - time.monotonic()
            found[names[peer]], _ = limited("link", max(left, 0.1), world.device, partial(measure_link, world, peer))
    rates = [each[0] for each in found.values() if each]
    clocks = {name: each[1] for name, each in found.items() if each and each[1] is not None}
    cut = [name for name, each in found.items() if not each]
    return {**({"link": float(np.median(rates))} if rates else {}), "clocks": clocks, "cut": cut}


def _by_node(names: list[str], reports: dict[int, Any], links: dict[int, Any]) -> dict[str, dict[str, Any]]:
    """Join what is known of each node: from its first rank, faults from all; ``lost``: ranks without an answer."""
    nodes: dict[str, dict[str, Any]] = {}
    for rank, name in enumerate(names):
        report, link = reports.get(rank, {"faults": []}), links.get(rank, {})
        node = nodes.setdefault(name, {**report, **link, "faults": [], "ranks": 0, "lost": []})
        node["ranks"] += 1
        node["faults"] += report["faults"]
        for what in ("memory", "gpu_memory"):
            node |= {what: min(node[what], report[what])} if what in node and what in report else {}
        of_first = node.get("versions", {})
        for what in of_first.keys() & report.get("versions", {}):  # another GPU, or a rank in another environment
            if of_first[what] != (of_rank := report["versions"][what]):
                node["faults"].append(f"rank {rank} has {what} {of_rank}, rank {names.index(name)} has {of_first[what]}")
        if rank not in reports or rank == names.index(name) and not link:
            node["lost"].append(rank)
        if node["ranks"] == 1 and node.get("data"):
            node["data"], node["batches"], node["damaged"] = node["data"]
    for name, node in nodes.items():  # a clock is read by one of the two
        ahead = [-other["clocks"][name] for other in nodes.values() if name in other.get("clocks", {})]
        ahead += node.get("clocks", {}).values()
        node |= {"clock": float(np.median([0.0, *ahead]))} if ahead else {}  # its own among them
    return nodes


def judge(nodes: Mapping[str, dict[str, Any]]) -> Verdict:
    """Compare the nodes with each other: with the median of all for figures, with what most have for versions and counts, by pairs for
    links and clocks. What is wrong on every node that answers, such as data that is not there, is no node's fault, nor is anything in
    which as many nodes have one thing as another."""
    wrong: dict[str, list[str]] = {name: list(node["faults"]) for name, node in nodes.items()}
    for name, node in nodes.items():
        wrong[name] += [f"no answer from rank {', '.join(map(str, node['lost']))}"] if node["lost"] else []
    heard = {name: node for name, node in nodes.items() if "CPUs" in node}
    undecided = _compare_versions(heard, wrong)
    _compare_figures(nodes, wrong)
    undecided += _compare_pairs(nodes, wrong)
    damaged = _compare_damage(heard, wrong)
    same = {each: [name for name in nodes if each in wrong[name]] for sentences in wrong.values() for each in sentences}
    kind = {each: re.sub(r"[0-9]+", "", each) for each in same}  # figures may differ
    of_all = set.intersection(*({kind[each] for each in wrong[name]} for name in heard)) if heard else set()
    leave_out = [name for name in nodes if any(kind[each] not in of_all for each in wrong[name])]
    lines = _table(nodes, leave_out)
    lines += [f"{'every node' if len(names) == len(nodes) > 1 else ', '.join(names)}: {each}" for each, names in same.items()]
    lines += [f"undecided, which node is at fault: {each}" for each in undecided]
    if damaged:
        lines.append(f"the data itself, on every node: {counted(len(damaged), 'damaged image')}: {damaged[0]}")
    lines.append(f"verdict: {len(leave_out) or 'none'} of {counted(len(nodes), 'node')} to leave out")
    lines += [f"--exclude={','.join(leave_out)}"] * bool(leave_out)
    return Verdict(lines, leave_out, bool(same or damaged or undecided))


def _compare_versions(nodes: Mapping[str, dict[str, Any]], wrong: dict[str, list[str]]) -> list[str]:
    """Add to what is ``wrong`` where a node has not what most have; returns what no value has a majority in."""
    undecided = []
    facts = {name: {**node["versions"], "CPUs": str(node["CPUs"]), "ranks": str(node["ranks"])} for name, node in nodes.items()}
    for what in sorted(set().union(*facts.values())):
        found = {name: of_node.get(what, "none") for name, of_node in facts.items()}
        if (most := _of_most(found.values())) is not None:
            for name in found:
                wrong[name] += [f"{what} {found[name]}, where most have {most}"] if found[name] != most else []
            continue
        who = {each: first_few([name for name in found if found[name] == each]) for each in found.values()}
        undecided.append(f"{what} is {', '.join(f'{each} on {names}' for each, names in who.items())}")
    forms = {name: FORMS.index(node["decodes"]) for name, node in nodes.items() if node.get("decodes")}
    for name, form in forms.items():
        if form > (usual := statistics.median_low(forms.values())):  # a better one is welcome
            wrong[name].append(f"its GPU's decoder: {FORMS[form]}, where others have {FORMS[usual]}")
    return undecided


def _of_most(values: Collection[str]) -> str | None:
    """The value of more than half; None where there is none."""
    return next((value for value, count in Counter(values).most_common(1) if 2 * count > len(values)), None)


def _compare_figures(nodes: Mapping[str, dict[str, Any]], wrong: dict[str, list[str]]) -> None:
    medians = _reduced(nodes.values(), np.median)
    for name, node in nodes.items():
        if node.get("shm", 1.0) < _LEAST_SHM:
            wrong[name].append(f"/dev/shm has {1024 * node['shm']:.0f} MiB free, at least {1024 * _LEAST_SHM:.0f} are needed")
        for what, unit in _COLUMNS.items():  # all write to one output_dir at once, and some are served first
            if what != "output_dir" and isinstance(value := node.get(what), float) and value < _SHARE * medians[what]:
                less = f"less than a third of the nodes' median {_short(medians[what])}"
                wrong[name].append(f"{_short(value)} {unit}, {less}")


def _compare_pairs(nodes: Mapping[str, dict[str, Any]], wrong: dict[str, list[str]]) -> list[str]:
    """Add to what is ``wrong`` whose links fail and whose clock is off; returns where it may be the one node or the other."""
    well = {name: node for name, node in nodes.items() if not node["lost"]}
    cut = {frozenset((name, other)) for name, node in well.items() for other in node.get("cut", []) if other in well}
    blamed, left = _in_most(cut)
    for name in blamed:
        others = sorted(other for pair in cut if name in pair for other in pair - {name})
        wrong[name].append(f"its links to {counted(len(others), 'node')} fail, such as that to {others[0]}")
    undecided = [f"the link between {' and '.join(sorted(pair))} fails" for pair in left]
    clocks = {frozenset((name, other)): ahead for name, node in well.items() for other, ahead in node.get("clocks", {}).items()}
    blamed, left = _in_most({pair for pair, ahead in clocks.items() if abs(ahead) > _CLOCK})
    for name in blamed:
        wrong[name].append(f"its clock is {nodes[name]['clock']:+.1f} s from the nodes' median")
    return undecided + [f"the clocks of {' and '.join(sorted(pair))} differ by {abs(clocks[pair]):.1f} s" for pair in left]


def _in_most(pairs: set[frozenset[str]]) -> tuple[list[str], list[frozenset[str]]]:
    """Whom to blame for pairs of nodes that do not fit: again and again the nodes that are in most of them; and the pairs that are left
    where several are in one or two."""
    blamed, left = list[str](), set(pairs)
    while left:
        counts = Counter(name for pair in left for name in pair)
        most = [name for name, count in counts.items() if count == max(counts.values())]
        if len(most) > 1 and counts[most[0]] < 3:
            break
        blamed += most
        left = {pair for pair in left if pair.isdisjoint(most)}
    return blamed, sorted(left, key=sorted)


def _compare_damage(nodes: Mapping[str, dict[str, Any]], wrong: dict[str, list[str]]) -> list[str]:
    """Add to what is ``wrong`` which images only some nodes read damaged; returns those that no node has read well: not all get as far in
    their time."""
    places = {sentence: batch for node in nodes.values() for sentence, batch in node.get("damaged", {}).items()}
    readers = [node for node in nodes.values() if "damaged" in node]
    well = {
        each for each, batch in places.items() for node in readers if batch <= node["batches"] and each not in node["damaged"]
    }
    for name, node in nodes.items():
        if here := [each for each in node.get("damaged", {}) if each in well]:
            wrong[name].append(f"{counted(len(here), 'image')} it reads damaged, unlike the others: {here[0]}")
    return sorted(places.keys() - well)


def _reduced(nodes: Collection[Mapping[str, Any]], reduce: Callable[[list[float]], Any]) -> dict[str, Any]:
    """One figure of all nodes' for each column, without those that none of the nodes has."""
    known = {what: [node[what] for node in nodes if isinstance(node.get(what), float)] for what in (*_COLUMNS, "clock")}
    return {what: float(reduce(figures)) for what, figures in known.items() if figures}


def _table(nodes: Mapping[str, dict[str, Any]], leave_out: list[str]) -> list[str]:
    """A row for each node, first those to leave out."""
    well = {name: node for name, node in nodes.items() if name not in leave_out}
    if len(well) > _SHOWN:
        reduced: dict[str, Callable[..., Any]] = {"least": min, "median": np.median, "most": max}
        well = {f"{len(well)} others, {what}": _reduced(well.values(), reduce) for what, reduce in reduced.items()}
    columns = {
        what: unit for what, unit in _COLUMNS.items() if any(isinstance(node.get(what), float) for node in nodes.values())
    }
    rows = [["node", "ranks", "device", "CPUs", *columns.values(), "clock ms", ""]]
    for name, node in {**{name: nodes[name] for name in leave_out}, **well}.items():
        figures = [_short(node[what]) if isinstance(node.get(what), float) else "" for what in columns]
        ticks = f"{1000 * node['clock']:+,.1f}" if "clock" in node else ""
        place = (str(node.get(what, "")) for what in ("ranks", "device", "CPUs"))
        rows.append([name, *place, *figures, ticks, "leave out" if name in leave_out else "ok"])
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(size) for cell, size in zip(row, wide)).rstrip() for row in rows]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
