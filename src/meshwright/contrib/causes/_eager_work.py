"""Set the recorded work of an eager PyTorch step next to the account of the weighed one.

There is no program whose instructions could be matched one by one, so sums are compared: the FLOPs of matrix
products by the shapes of their operands, the bytes that are sent by kind of collective, and number formats.
What autograd records, and what belongs to no phase of a step, the trace itself tells.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from meshwright.eager import EagerAccount
from meshwright.ledger import FlopLedger

from ._program_work import Surplus
from ._recorded import COMPUTE_KINDS, COPY_KINDS, MESSAGE_KINDS, OUTSIDE, UNKNOWN, Recorded, Work
from ._xplane_programs import BITS

PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
NOISE = 1.02  # times the weighed FLOPs or bytes, that are no more than them
RECOMPUTES = 0.25  # of the forward pass's FLOPs: the weighed step runs a part of it again
EXTRA, MESSAGE, RECOMPUTED, WIDE = "extra work", "extra message", "recomputation", "wide product"
ASIDE = "beside forward pass, backward pass and update"


class EagerDifference:
    """Hold the work of a recorded eager step that the weighed one does not have.

    `matched`: the share of the FLOPs of products that both have; None where the trace has no shapes.

    Args:
        ratios: the seconds of a FLOP of a product by number format, where they are known.
    """

    def __init__(
        self, recorded: Recorded, account: EagerAccount, flops: FlopLedger, ratios: Mapping[str, float]
    ) -> None:
        self._ratios = ratios
        share = 1 / max(1, len(recorded.steps_of(recorded.steps[0].rank)) * len(recorded.devices))
        own = account.ranks[0].flops_by_operation
        weighed = sum(own.get(name, 0) for name in PRODUCTS)
        again = sum(each.flops * share for each in recorded.work if each.flops and each.recomputed)
        traced = sum(each.flops * share for each in recorded.work if each.flops and _is_of_step(each))
        per_rank = flops.recomputed / max(1, flops.executed) * sum(own.values())
        forward = account.ranks[0].flops_by_phase.get("forward", 0)
        recomputes = per_rank > RECOMPUTES * forward
        self._recomputed = max(0.0, 1 - per_rank / again) if again else float(not recomputes)
        self._recomputed = 0.0 if recomputes and not again else self._recomputed
        kept = weighed - min(again, per_rank if recomputes else 0.0)
        self.matched = min(traced, kept) / max(traced, kept) if traced and kept > 0 else None
        self.ratio = traced / kept if kept > 0 else 1.0
        self._products = max(0.0, 1 - kept / traced) if traced > NOISE * kept else 0.0
        self._messages = _surplus_of_messages(recorded, account, share)
        self._formats = {name for name, number in flops.by_format.items() if number}

    def surplus_of(self, work: Work) -> Sequence[Surplus]:
        """Return which shares of a work's seconds the weighed step does not have."""
        source = work.source or ""
        if work.kind in MESSAGE_KINDS:
            extra = self._messages.get(work.kind, 0.0)
            words = f"{work.kind}, {extra:.0%} of its bytes"
            return (Surplus(what=MESSAGE, share=extra, source=source, words=words),) if extra else ()
        if work.recomputed:
            again = self._recomputed
            return (Surplus(what=RECOMPUTED, share=again, source=source),) if again else ()
        if work.kind in COPY_KINDS and work.kind != "copy":
            return ()
        if work.phase == OUTSIDE and work.kind in (*COMPUTE_KINDS, UNKNOWN, "copy"):
            inside = " in " + work.scope.partition("/")[0] if work.scope else ""
            return (Surplus(what=EXTRA, share=1.0, source=source, words=f"work {ASIDE}{inside}"),)
        found: list[Surplus] = []
        if work.kind == "matmul" and work.flops and self._products:
            words = f"{self.ratio:.2f} times the FLOPs of its products"
            found.append(Surplus(what=EXTRA, share=self._products, source=source, words=words))
        return [*found, *self._wide(work, 1 - sum(each.share for each in found))]

    def _wide(self, work: Work, left: float) -> list[Surplus]:
        """Return the share of a product's seconds that its wider format costs."""
        name = work.format_name
        if work.kind != "matmul" or name is None or name in self._formats or name not in BITS:
            return []
        narrower = [each for each in self._formats if BITS.get(each, 0) and BITS[each] < BITS[name]]
        if not narrower:
            return []
        narrow = max(narrower, key=lambda each: BITS[each])
        known = narrow in self._ratios and name in self._ratios
        times = self._ratios[narrow] / self._ratios[name] if known else BITS[narrow] / BITS[name]
        words = f"{name} where the weighed program has {narrow}"
        share = left * max(0.0, 1 - times)
        return [Surplus(what=WIDE, share=share, source=work.source or "", words=words)] if share else []


def _is_of_step(work: Work) -> bool:
    return not work.recomputed and work.phase != OUTSIDE


def _surplus_of_messages(recorded: Recorded, account: EagerAccount, share: float) -> dict[str, float]:
    """Return by kind of message the share of its bytes that is not weighed; 1 of a kind that is not."""
    sent, calls = defaultdict[str, float](float), Counter[str]()
    unknown = Counter[str]()
    for work in recorded.work:
        if work.kind in MESSAGE_KINDS:
            sent[work.kind] += (work.num_bytes or 0.0) * share
            calls[work.kind] += 1
            unknown[work.kind] += work.num_bytes is None
    found: dict[str, float] = {}
    for kind in calls:
        messages = [each for each in account.messages if each.kind == kind]
        weighed = sum(each.array_bytes for each in messages)
        if kind == "message":  # the trace does not tell which: extra only if nothing at all is weighed
            found.update({kind: 1.0} if not account.messages else {})
        elif not messages:
            found[kind] = 1.0
        elif not unknown[kind] and sent[kind] > NOISE * weighed:
            found[kind] = 1 - weighed / sent[kind]
    return found
