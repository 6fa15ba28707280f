"""The static rules: a family a module, each a function from a view of a kernel to its findings.

To add a rule, write it in its family's module and name it here, in the table of the form it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from workbench.findings import Finding
from workbench.verify.ordering.rules.arrivals import elected_arrivals
from workbench.verify.ordering.rules.barriers import barriers_ptx, barriers_sass
from workbench.verify.ordering.rules.cluster import cluster_rules, sass_cluster_rules
from workbench.verify.ordering.rules.copies import copy_groups
from workbench.verify.ordering.rules.flags import flag_rules, sass_flag_rules, scope_rules
from workbench.verify.ordering.rules.mbarrier import mbarrier_phases, remote_pairs
from workbench.verify.ordering.rules.multimem import multimem_rules, sass_multimem_rules
from workbench.verify.ordering.rules.proxy import proxy_fences
from workbench.verify.ordering.rules.proxy_sass import proxy_fences_sass
from workbench.verify.ordering.rules.residency import co_residence, sass_co_residence
from workbench.verify.ordering.rules.reuse import reused_buffers
from workbench.verify.ordering.rules.state import persistent_state
from workbench.verify.ordering.rules.tcgen05 import tcgen05_order
from workbench.verify.ordering.rules.tcgen05_sass import handed_back_in_sass
from workbench.verify.ordering.rules.tmem import tmem_lifetime
from workbench.verify.ordering.rules.wgmma import wgmma_order
from workbench.verify.ordering.view import PtxView, SassView

PtxRule = Callable[[PtxView], Iterable[Finding]]
SassRule = Callable[[SassView], Iterable[Finding]]

PTX_RULES: dict[str, tuple[PtxRule, ...]] = {
    "flag-without-acquire": (flag_rules,),
    "flag-without-release": (flag_rules,),
    "scope-too-narrow": (flag_rules, scope_rules, cluster_rules),
    "elected-arrive": (elected_arrivals,),
    "cluster-barrier": (cluster_rules,),
    "multimem-order": (multimem_rules,),
    "not-co-resident": (co_residence,),
    "persistent-device-state": (persistent_state,),
    "proxy-fence-missing": (proxy_fences,),
    "cp-async-group": (copy_groups,),
    "buffer-reuse": (reused_buffers,),
    "mbarrier-phase": (mbarrier_phases, remote_pairs),
    "barrier-divergence": (barriers_ptx,),
    "barrier-reuse": (barriers_ptx,),
    "tcgen05-order": (tcgen05_order,),
    "tmem-lifetime": (tmem_lifetime,),
    "wgmma-order": (wgmma_order,),
}
"""Rule id to the functions that decide it on the PTX; one may stand under several ids and runs once."""
SASS_RULES: dict[str, tuple[SassRule, ...]] = {
    "flag-without-acquire": (sass_flag_rules,),
    "flag-without-release": (sass_flag_rules,),
    "scope-too-narrow": (sass_flag_rules,),
    "cluster-barrier": (sass_cluster_rules,),
    "multimem-order": (sass_multimem_rules,),
    "not-co-resident": (sass_co_residence,),
    "proxy-fence-missing": (proxy_fences_sass,),
    "barrier-divergence": (barriers_sass,),
    "barrier-reuse": (barriers_sass,),
    "tcgen05-order": (handed_back_in_sass,),
}
"""The same on the SASS; where the PTX is there, `SassView.ptx` has it."""
PDL_RULES = (
    "pdl-load-before-wait",
    "pdl-wait-missing",
    "pdl-chain-not-transitive",
    "pdl-early-trigger",
    "nc-load-of-mutable",
    "prefetch-sunk",
)
"""Decided by `rules.pdl` on solved event programs, of both forms together."""

SOURCE_RULES = ("asm-ordering",)
"""Decided by `rules.asm` on source text, where a kernel comes with one."""


def decided() -> tuple[str, ...]:
    """Ids of all rules that the static audit decides."""
    return tuple(dict.fromkeys((*PDL_RULES, *PTX_RULES, *SASS_RULES, *SOURCE_RULES)))


def apply(ptx: PtxView | None, sass: SassView | None) -> list[Finding]:
    """Run all rules of the tables on the forms that there are."""
    found: list[Finding] = []
    if ptx is not None:
        for rule in dict.fromkeys(r for rules in PTX_RULES.values() for r in rules):
            found += rule(ptx)
    if sass is not None:
        for sass_rule in dict.fromkeys(r for rules in SASS_RULES.values() for r in rules):
            found += sass_rule(sass)
    return found
