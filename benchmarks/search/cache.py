"""A plan cache hit: the time from the captured graph to the cached plan."""

from __future__ import annotations

import gc
import math
import tempfile
import time
from pathlib import Path

from benchmarks.search.outcome import Claim, Outcome, Setting
from benchmarks.search.speed import NODES, graph_of
from strategies.core.plan import Plan
from strategies.core.request import Request
from strategies.planner import plan_cache
from strategies.planner.planner import make_plan

TITLE = "Plans from the cache"
GOAL = 0.2


def measure(setting: Setting) -> Outcome:
    """The 8B shape on (8) and (8, 8): for the hit the graph is captured again and the planner's sources are hashed
    again, as in another process."""
    rows, worst = [], 0.0
    for sizes in ((8,),) if setting.quick else ((8,), (8, 8)):
        request = Request("auto", math.prod(sizes), "dynamic_programming", tuple(zip("ab", sizes, strict=False)))
        graph = graph_of("8b", 64, 2048)
        with tempfile.TemporaryDirectory() as name:
            started = time.process_time()
            plan = make_plan(graph, request, NODES)
            searched = time.process_time() - started
            plan_cache.store(Path(name), plan_cache.key_of(graph, request, NODES), plan.to_json(), print)
            again = graph_of("8b", 64, 2048)
            plan_cache._code.cache_clear()
            gc.collect()  # or collecting earlier garbage would count as part of the hit
            started = time.process_time()
            found = plan_cache.load(Path(name), plan_cache.key_of(again, request, NODES), print, Plan.from_json)
            hit = time.process_time() - started
        assert found == plan
        worst = max(worst, hit)
        rows.append((" x ".join(map(str, sizes)), str(len(graph.operators)), f"{searched:.2f}", f"{hit:.3f}"))
    claim = Claim("a hit of the plan cache, 8B shape: at most 0.2 s", f"{worst:.2f} s", worst <= GOAL)
    return Outcome((claim,), ("mesh", "operators", "planned, s", "hit, s"), tuple(rows))
