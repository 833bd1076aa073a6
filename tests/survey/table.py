"""The results of the survey as a page: numbers by registry, then every architecture that is not exact, by cause."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import median

from tests.survey.outcomes import Outcome

HEAD = """# Survey

Written by `python -m tests.survey --write docs/survey.md` from results that `--resume FILE` keeps. One class of each
type of model that the installed packages have (`--all`: every class; transformers: the first of causal, masked and
sequence-to-sequence language model, classifier, ..., base model that the type has) is built small and at random,
nothing is downloaded: configs of transformers are shrunk, models of timm and torchvision get pictures of 64 pixels a
side (videos of 32) where they take them, and of consecutive equal blocks two. Vision towers whose forward takes the
sizes of pictures get them as constants. It is trained for one step eagerly and on 4 simulated ranks under three plans:
data parallel, a search, and a random one, which also runs as generated modules in threads.

* `exact`: loss, every gradient and every buffer agree (1e-10 in double precision; classes that do not compute in it:
  1e-5; or 3 times one device's own rounding where that is more: in double precision 3 times what its gradients change
  by where every weight changes in its last bit, as sums in another order do, a gradient of terms that cancel by
  itself, and by its size where it is nothing but rounding; in single precision their error).
* `refused`: an error with a code says what to change.
* `late`: over the time limit for one class.
* `unbuilt`: no config or batch of the survey suits the class, or eager torch does not train it. Not counted.
* Of torchvision, detectors need compiled operators that wheels for another build of torch lack, and choose boxes by
  their values; they are left out. Models that are made to be quantized are trained as they are before that.
* Dropout is off, and so is the dropping of layers, by which a forward trains other parameters in every step: with the
  default `layerdrop` of Wav2Vec2 it is refused (MW901), which these figures leave out. `layerdrop=0.0` trains.
"""
SIMILAR = 60
"""Causes with as many equal characters at their beginning are one, whatever the numbers in them."""
PLAIN = str.maketrans({"|": "/", "<": "(", ">": ")", "[": "(", "]": ")"})
STATUSES = ("exact", "refused", "differs", "crash", "late", "unbuilt")


def markdown(results: Sequence[Outcome], wanted: int) -> str:
    """The page docs/survey.md; `wanted` is the number of classes that the registries have."""
    parts = [
        HEAD,
        "| package | classes | "
        + " | ".join(STATUSES)
        + " | exact of those that eager trains | minutes of a core | median seconds |",
    ]
    parts.append("|---" * (len(STATUSES) + 5) + "|")
    for registry in sorted({one.registry for one in results}):
        own = [one for one in results if one.registry == registry]
        counts = Counter(one.status for one in own)
        trained = len(own) - counts["unbuilt"]
        cells = " | ".join(str(counts[status]) for status in STATUSES)
        minutes = sum(one.seconds for one in own) / 60
        share, each = counts["exact"] / max(trained, 1), median(one.seconds for one in own)
        parts.append(f"| {registry} | {len(own)} | {cells} | {share:.1%} | {minutes:.0f} | {each:.1f} |")
    parts.append(f"\n{len(results)} of {wanted} classes were tried.\n")
    for status in STATUSES[1:]:
        some = [one for one in results if one.status == status]
        if some:
            causes: defaultdict[str, list[Outcome]] = defaultdict(list)
            for one in some:
                causes[re.sub(r"\d+", "0", one.cause)[:SIMILAR]].append(one)
            parts.append(f"## {status} ({len(some)})\n")
            for similar in sorted(causes.values(), key=lambda similar: (-len(similar), similar[0].name)):
                cause = re.sub(r"[`*_]", r"\\\g<0>", similar[0].cause.translate(PLAIN))
                parts.append(f"* {', '.join(sorted(one.name for one in similar))}: {cause}")
            parts.append("")
    return "\n".join(parts).rstrip() + "\n"
