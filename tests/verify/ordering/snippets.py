"""PTX kernels for the ordering tests, their contracts, and a short way to audit them."""

from __future__ import annotations

from pathlib import Path

from workbench.verify.ordering import AuditFinding, AuditTarget, audit_file
from workbench.verify.report import Verdict

DECLARE = """
.reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .f32 %f<20>;
.shared .align 8 .b8 sm[256];
ld.param.b64 %rd1, [P0]; ld.param.b64 %rd2, [P1]; ld.param.b64 %rd3, [P2]; ld.param.b32 %r9, [P3];
mov.u32 %r1, %tid.x; mov.u32 %r3, %ctaid.x; mad.lo.s32 %r4, %r3, 128, %r1;
mul.wide.s32 %rd4, %r4, 4; add.s64 %rd5, %rd1, %rd4; add.s64 %rd6, %rd2, %rd4; add.s64 %rd7, %rd3, %rd4;
shr.u32 %r2, %r1, 5; and.b32 %r5, %r1, 31; mov.b32 %r8, sm;
setp.eq.s32 %p1, %r1, 0; setp.eq.s32 %p2, %r2, 0; setp.eq.s32 %p3, %r5, 0;
"""
"""%rd5, %rd6, %rd7: this thread's element of x, w, out; %p1: thread 0; %p2: warp 0; %p3: lanes 0."""
WAIT = "griddepcontrol.wait;\n"
LOAD_X = "ld.global.f32 %f1, [%rd5];\n"
LOAD_W = "ld.global.f32 %f2, [%rd6];\n"
STORE = "add.f32 %f3, %f1, 0f3F800000; st.global.f32 [%rd7], %f3;\n"


def ptx(body: str, *, arch: str = "sm_103a", name: str = "k", declare: str = DECLARE) -> str:
    """One kernel `name(P0 x, P1 w, P2 out, P3 n)` of 128 threads."""
    return head(arch) + entry(body, name, declare)


def head(arch: str) -> str:
    version = "9.0" if arch == "sm_103a" else "8.4"
    return f".version {version}\n.target {arch}\n.address_size 64\n"


def entry(body: str, name: str = "k", declare: str = DECLARE) -> str:
    return (
        f".visible .entry {name}(.param .u64 P0, .param .u64 P1, .param .u64 P2, .param .u32 P3)\n"
        f".reqntid 128,1,1\n{{\n{declare}\n{body}\nret;\n}}\n"
    )


def contract(*, pdl: bool = True, name: str = "k", block: int = 128, **roles: str) -> str:
    """Contract of `ptx`; `roles` override x = activation, w = weight, out = output.

    It says no sizes, so that the kernels, which are often nothing but a fragment, are not run.
    """
    text = (
        f'[[kernel]]\nname = "{name}"\ngrid = [8, 1, 1]\nblock = [{block}, 1, 1]\npdl = {str(pdl).lower()}\n'
    )
    for n, (buffer, role) in enumerate({"x": "activation", "w": "weight", "out": "output"}.items()):
        text += f'[[kernel.buffer]]\nparam = {n}\nname = "{buffer}"\n'
        text += f'role = "{roles.get(buffer, role)}"\n'
    return text + "[[kernel.scalar]]\nparam = 3\nvalue = 1024\n"


def audit(folder: Path, text: str, terms: str | None) -> AuditTarget:
    """Audit the only kernel of a PTX text (and of the SASS that ptxas makes of it)."""
    path = folder / "k.ptx"
    path.write_text(text)
    toml: Path | None = None
    if terms is not None:
        toml = folder / "k.toml"
        toml.write_text(terms)
    (target,) = audit_file(path, toml).targets
    return target


def rules(target: AuditTarget, severity: str = "error") -> list[str]:
    return [f.rule for f in target.findings if f.severity == severity]


def clean(target: AuditTarget) -> bool:
    return target.verdict is Verdict.PASS and not target.findings


def only(target: AuditTarget, rule: str) -> AuditFinding:
    """The one finding of a rule."""
    (found,) = [f for f in target.findings if f.rule == rule]
    return found
