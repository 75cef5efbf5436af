"""Collect what the ranks find, judge each node beside the others, and say in a table and a verdict which to leave out.

No rank is waited for without a limit: all put what they find into the job's store, and rank 0 takes what is there in time.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from pipeline.cluster.environment import nodes_of
from pipeline.cluster.meeting import store_client
from pipeline.cluster.world import World, name_ranks
from pipeline.config import Config
from pipeline.errors import UserError, counted
from pipeline.health.checks import examine_rank, limited, measure_link, node_name, partner
from pipeline.logs.console import say_once

SECONDS = 180.0  # for all of it; a third each for the meeting, for what a rank can do alone, and for the links
_SHARE = 1 / 3  # of the median of all nodes: who has less is slow, or short of memory
_LEAST_SHM = 1 / 16  # GiB: NCCL's buffers between the processes of a node
_CLOCK = 1.0  # seconds from the median of all nodes' clocks
_RATES = ("data", "cache", "output_dir", "link")
_COLUMNS = {"memory": "GiB free", "shm": "GiB /dev/shm", **{what: f"{what} MB/s" for what in _RATES}}
_SHOWN = 16  # of the nodes that are well; of more, the extremes and the median


@dataclass(frozen=True)
class Verdict:
    """What rank 0 has found: a page of lines for people, and the nodes to leave out; ``sick``: anything at all is wrong."""

    lines: list[str]
    leave_out: list[str]
    sick: bool


def examine(config: Config, world: World, seconds: float = SECONDS) -> Verdict:
    """Examine all nodes of a job; a rank that stops answering is named. Collective, with the same result on every rank."""
    names = world.gather(node_name())
    leaders = [names.index(name) for name in dict.fromkeys(names)]
    say_once(world, f"examining {counted(len(leaders), 'node')} with {counted(world.size, 'process')}, at most {seconds:.0f} s")
    store = store_client(seconds) if world.size > 1 else dist.HashStore()
    own = examine_rank(config, world, world.rank in leaders, 0.8 * seconds / 3)
    store.set(f"doctor/own/{world.rank}", json.dumps(own))
    reports: dict[int, Any] = {}
    if world.is_main:
        reports = _collect(store, "own", range(world.size), seconds / 3)
        store.set("doctor/leaders", json.dumps([rank for rank in leaders if rank in reports]))
    answering = json.loads(store.get("doctor/leaders"))
    if world.rank in answering:
        store.set(f"doctor/links/{world.rank}", json.dumps(_links(world, answering, names, seconds / 4)))
    if world.is_main:
        links = _collect(store, "links", answering, seconds / 3)
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
        remedy = again if verdict.leave_out else "mend what is wrong on every node"
        raise UserError("the doctor finds that this job must not train as it is, see above", remedy)


def absent(missing: Sequence[int]) -> list[str]:
    """The last lines for ranks that never came: the nodes to leave out, as far as Slurm tells where they should be."""
    nodes = ",".join(nodes_of(missing, int(os.environ["WORLD_SIZE"])))
    lines = [f"verdict: {nodes or f'the node of {name_ranks(missing)}'} to leave out"] if missing else []
    return lines + [f"--exclude={nodes}"] * bool(nodes)


def _collect(store: dist.Store, what: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
    """What ranks have put into the store, without those from whom nothing comes in time."""
    found, deadline = {}, time.monotonic() + seconds
    for rank in ranks:
        key = f"doctor/{what}/{rank}"
        with suppress(RuntimeError):  # PyTorch's, after the time
            store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
            found[rank] = json.loads(store.get(key))
    return found


def _links(world: World, leaders: list[int], names: list[str], seconds: float) -> dict[str, Any]:
    """Measure the links from this node to all others, two by two."""
    count, index = len(leaders) + len(leaders) % 2, leaders.index(world.rank)
    rates, faults, offset, deadline = dict[str, float](), list[str](), 0.0, time.monotonic() + seconds
    for turn in range(count - 1):
        other = partner(index, turn, count)
        if other >= len(leaders) or (left := deadline - time.monotonic()) <= 0:
            continue
        peer, with_clock = leaders[other], 0 in (index, other)
        what, limit = f"link to {names[peer]}", min(left, seconds / 3)
        found, wrong = limited(what, limit, world.device, partial(measure_link, world, peer, with_clock))
        faults += wrong
        if found:
            rates[names[peer]] = found[0]
            offset = offset if found[1] is None else found[1]
    return {**({"link": float(np.median(list(rates.values())))} if rates else {}), "clock": offset, "link_faults": faults}


def _by_node(names: list[str], reports: dict[int, Any], links: dict[int, Any]) -> dict[str, dict[str, Any]]:
    """Join what is known of each node: from its first rank, faults from all; ``lost``: ranks without an answer."""
    nodes: dict[str, dict[str, Any]] = {}
    for rank, name in enumerate(names):
        report, link = reports.get(rank, {"faults": []}), links.get(rank, {})
        node = nodes.setdefault(name, {**report, **link, "faults": [], "ranks": 0, "lost": []})
        node["ranks"] += 1
        node["faults"] += report["faults"]
        if rank not in reports or rank == names.index(name) and not link:
            node["lost"].append(rank)
        if node["ranks"] == 1 and node.get("data"):
            node["data"], node["damaged"] = node["data"]
    return nodes


def judge(nodes: Mapping[str, dict[str, Any]]) -> Verdict:
    """Compare the nodes with each other: with the median of all for figures, with what most have for versions and counts. What is
    wrong on every node that answers, such as data that is not there, is no node's fault."""
    wrong: dict[str, list[str]] = {name: list(node["faults"]) for name, node in nodes.items()}
    heard = {name: node for name, node in nodes.items() if "CPUs" in node}
    facts = {name: {**node["versions"], "CPUs": str(node["CPUs"]), "ranks": str(node["ranks"])} for name, node in heard.items()}
    known = sorted(set().union(*facts.values()))
    usual = {what: Counter(found.get(what, "none") for found in facts.values()).most_common(1)[0][0] for what in known}
    medians = _reduced(nodes.values(), np.median)
    images = [set(node["damaged"]) for node in nodes.values() if "damaged" in node]
    of_data = set.intersection(*images) if images else set()
    all_answer = not any(node["lost"] for node in nodes.values())
    for name, node in nodes.items():
        say = wrong[name].append
        if node["lost"]:
            say(f"no answer from rank {', '.join(map(str, node['lost']))}")
        if node.get("decoder"):
            say(node["decoder"])
        if node.get("shm", 1.0) < _LEAST_SHM:
            say(f"/dev/shm has {1024 * node['shm']:.0f} MiB free, at least {1024 * _LEAST_SHM:.0f} are needed")
        failed = node.get("link_faults", [])  # a link has two ends: the node that most others do not reach is at fault
        if all_answer and len(failed) > (len(nodes) - 1) / 2:
            wrong[name] += failed
        for what, most in usual.items() if name in facts else ():
            if (found := facts[name].get(what, "none")) != most:
                say(f"{what} {found}, where most have {most}")
        for what, unit in _COLUMNS.items():  # all write to one output_dir at once, and some are served first
            if what != "output_dir" and isinstance(value := node.get(what), float) and value < _SHARE * medians[what]:
                say(f"{_short(value)} {unit}, less than a third of the nodes' median {_short(medians[what])}")
        if "clock" in node and abs(apart := node["clock"] - medians["clock"]) > _CLOCK:
            say(f"its clock is {apart:+.1f} s from the nodes' median")
        if here := [sentence for sentence in node.get("damaged", []) if sentence not in of_data]:
            say(f"{counted(len(here), 'image')} it reads damaged, unlike the others: {here[0]}")
    same = {each: [name for name in nodes if each in wrong[name]] for sentences in wrong.values() for each in sentences}
    of_all = {sentence for sentence, names in same.items() if 1 < len(names) == len(facts)}
    leave_out = [name for name in nodes if not of_all.issuperset(wrong[name])]
    lines = _table(nodes, leave_out)
    lines += [f"{'every node' if sentence in of_all else ', '.join(names)}: {sentence}" for sentence, names in same.items()]
    if of_data:
        lines.append(f"the data itself, on every node: {counted(len(of_data), 'damaged image')}: {min(of_data)}")
    lines.append(f"verdict: {len(leave_out) or 'none'} of {counted(len(nodes), 'node')} to leave out")
    lines += [f"--exclude={','.join(leave_out)}"] * bool(leave_out)
    return Verdict(lines, leave_out, bool(leave_out or of_data or of_all))


def _reduced(nodes: Iterable[Mapping[str, Any]], reduce: Callable[[list[float]], Any]) -> dict[str, Any]:
    """One figure of all nodes' for each column, without those that none of the nodes has."""
    nodes = list(nodes)
    known = {what: [node[what] for node in nodes if isinstance(node.get(what), float)] for what in (*_COLUMNS, "clock")}
    return {what: float(reduce(figures)) for what, figures in known.items() if figures}


def _table(nodes: Mapping[str, dict[str, Any]], leave_out: list[str]) -> list[str]:
    """A row for each node, first those to leave out."""
    well = {name: node for name, node in nodes.items() if name not in leave_out}
    if len(well) > _SHOWN:
        reduced: dict[str, Callable[..., Any]] = {"least": min, "median": np.median, "most": max}
        well = {f"{len(well)} others, {what}": _reduced(well.values(), reduce) for what, reduce in reduced.items()}
    rows = [["node", "ranks", "device", "CPUs", *_COLUMNS.values(), "clock ms", ""]]
    for name, node in {**{name: nodes[name] for name in leave_out}, **well}.items():
        figures = [_short(node[what]) if isinstance(node.get(what), float) else "" for what in _COLUMNS]
        ticks = f"{1000 * node['clock']:+,.1f}" if "clock" in node else ""
        place = (str(node.get(what, "")) for what in ("ranks", "device", "CPUs"))
        rows.append([name, *place, *figures, ticks, "leave out" if name in leave_out else "ok"])
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(size) for cell, size in zip(row, wide)).rstrip() for row in rows]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
