"""Claims about speed: which are like for like, which are not, and which nobody can judge."""

from workbench.report.claims.judge import ClaimsDocument, Judgement, Verdict, judge, judge_all
from workbench.report.claims.model import Claim, ClaimFile, Measurement
from workbench.report.claims.reading import BUILT_IN, find, load_claims, pair

__all__ = [
    "BUILT_IN", "Claim", "ClaimFile", "ClaimsDocument", "Judgement", "Measurement", "Verdict", "find",
    "judge", "judge_all", "load_claims", "pair",
]  # fmt: skip
