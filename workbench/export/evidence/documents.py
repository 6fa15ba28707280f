"""A bundle's statements as documents of the report."""

from __future__ import annotations

from workbench.export.evidence.bundle import BundleManifest, KernelEntry
from workbench.export.provenance import Provenance
from workbench.report.evidence import EvidenceFigure, EvidenceKernel, EvidenceWaiver
from workbench.report.evidence_text import bundle_markdown


def kernel_documents(manifest: BundleManifest) -> tuple[EvidenceKernel, ...]:
    """The kernels of a bundle."""
    return tuple(kernel_document(k) for k in manifest.kernels)


def kernel_document(entry: KernelEntry) -> EvidenceKernel:
    """One kernel of a bundle."""
    t = entry.toolchain
    hashes = {
        "source": entry.source_sha256,
        "PTX": entry.ptx_sha256,
        "cubin": entry.cubin_sha256,
        "SASS": entry.sass_sha256,
    }
    return EvidenceKernel(
        key=entry.key,
        op=entry.op,
        workload=entry.workload,
        arch=entry.arch,
        template=entry.template,
        knobs=entry.knobs,
        verdict=entry.verdict,
        checks=entry.checks,
        waived=entry.waived,
        waivers=tuple(
            EvidenceWaiver(finding=w.finding, person=w.person, reason=w.reason) for w in entry.waivers
        ),
        rests_on=_premises(entry.provenance) if entry.provenance is not None else {},
        toolchain=f"CuTe DSL {t.dsl} (CUDA {t.flavour}), PTX ISA {t.ptx_isa}, ptxas {t.ptxas} "
        f"{' '.join(t.ptxas_flags)}".strip(),
        hashes={name: h for name, h in hashes.items() if h is not None},
        figures=tuple(
            EvidenceFigure(kind=f.kind, us=f.us, samples=f.samples, premises=f.premises)
            for f in entry.figures
        ),
    )


def _premises(p: Provenance) -> dict[str, str]:
    return {
        "seed": str(p.seed),
        "contract": p.op_hash,
        "tolerances": p.tolerance_hash,
        "verifier": p.verifier_hash,
        "workbench": f"{p.workbench} {p.workbench_hash}",
        "libraries": ", ".join(f"{name} {version}" for name, version in sorted(p.libraries.items())),
        "machine": f"{p.machine}, Python {p.python}",
    }


def readme(manifest: BundleManifest) -> bytes:
    """What `README.md` of a bundle holds."""
    return bundle_markdown(kernel_documents(manifest), manifest.workbench, manifest.notes).encode()
