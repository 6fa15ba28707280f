from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from workbench.errors import MissingToolError, WorkbenchError
from workbench.export.evidence.archive import pack
from workbench.export.evidence.check import SignatureError, check_bundle
from workbench.export.evidence.signing import (
    find_tool,
    sign,
    signature_path,
    verify_minisign,
    verify_sigstore,
)
from workbench.verify.report import Verdict

KEY = "RW" + "A" * 54

# Stand in for the programs with the options that their manuals document; a signature is a hash with the key.
MINISIGN = """#!/bin/sh
echo "minisign $*" >> "$(dirname "$0")/calls"
while [ $# -gt 0 ]; do
  case "$1" in
    -S|-V) mode=$1 ;; -q) ;;
    -s|-p) key=$(cat "$2"); shift ;; -P) key=$2; shift ;;
    -m) file=$2; shift ;; -x) signature=$2; shift ;; -t) shift ;;
    *) echo "usage" >&2; exit 2 ;;
  esac
  shift
done
want="$key $(sha256sum < "$file")"
if [ "$mode" = -S ]; then echo "$want" > "$signature"; exit 0; fi
[ "$(cat "$signature")" = "$want" ] || { echo "Signature verification failed" >&2; exit 1; }
"""
SIGSTORE = """#!/bin/sh
echo "sigstore $*" >> "$(dirname "$0")/calls"
if [ "$1" = sign ]; then
  [ "$2 $3" = "--overwrite --bundle" ] && sha256sum < "$5" > "$4"
  exit $?
fi
[ "$1 $2 $3 $4" = "verify identity --offline --bundle" ] || exit 2
[ "$6 $8" = "--cert-identity --cert-oidc-issuer" ] || exit 2
[ "$7" = me@example.org ] && sha256sum < "${10}" | cmp -s - "$5" && exit 0
echo "FAIL: ${10}" >&2
exit 1
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "b.tar"
    path.write_bytes(pack({"bundle.json": b"{}"}))
    return path


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs at the head of the path; returns the file that notes their calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("minisign", MINISIGN), ("sigstore", SIGSTORE)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    (tmp_path / "secret.key").write_text(KEY)
    (tmp_path / "public.key").write_text(KEY)
    return folder / "calls"


@pytest.mark.usefixtures("tools")
def test_a_signature_holds_until_a_byte_changes(bundle: Path, tmp_path: Path) -> None:
    assert sign(bundle, "minisign", tmp_path / "secret.key") == tmp_path / "b.tar.minisig"
    for key in (KEY, str(tmp_path / "public.key")):
        assert "b.tar.minisig holds for the key" in verify_minisign(bundle, key)
    with pytest.raises(SignatureError, match="Signature verification failed"):
        verify_minisign(bundle, "RW" + "B" * 54)
    bundle.write_bytes(bundle.read_bytes()[:-1] + b"x")
    with pytest.raises(SignatureError, match=r"b\.tar\.minisig does not hold: minisign says: Signature"):
        verify_minisign(bundle, KEY)


@pytest.mark.usefixtures("tools")
def test_sigstore_signs_for_an_identity(bundle: Path) -> None:
    path = sign(bundle, "sigstore")
    assert path == signature_path(bundle, "sigstore") and path.name == "b.tar.sigstore.json"
    assert "holds for me@example.org" in verify_sigstore(bundle, "me@example.org", "https://issuer.example")
    with pytest.raises(SignatureError, match="FAIL"):
        verify_sigstore(bundle, "you@example.org", "https://issuer.example")


@pytest.mark.usefixtures("tools")
def test_a_check_says_who_signed_and_names_a_signature_that_does_not_hold(
    bundle: Path, tmp_path: Path
) -> None:
    def checked() -> tuple[str, list[str]]:
        document = check_bundle(bundle, signature=lambda path: verify_minisign(path, KEY))
        return document.signature, [p.what for p in document.problems if p.where == "signature"]

    assert checked() == ("does not hold", ["there is no b.tar.minisig beside the bundle"])
    sign(bundle, "minisign", tmp_path / "secret.key")
    assert checked() == (f"minisign signature b.tar.minisig holds for the key {KEY}", [])
    (tmp_path / "b.tar.minisig").write_text("x")
    said, problems = checked()
    assert said == "does not hold" and len(problems) == 1
    assert check_bundle(bundle, signature=lambda path: verify_minisign(path, KEY)).verdict is Verdict.FAIL


@pytest.mark.parametrize("tool", ["minisign", "sigstore"])
def test_an_absent_tool_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    for call in (
        lambda: find_tool(tool),
        lambda: sign(bundle, tool),
        lambda: verify_minisign(bundle, KEY) if tool == "minisign" else verify_sigstore(bundle, "a", "b"),
    ):
        with pytest.raises(MissingToolError, match=f"{tool} is not installed"):
            call()


@pytest.mark.usefixtures("tools")
def test_bad_keys_are_said(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(WorkbenchError, match="neither a minisign public key"):
        verify_minisign(bundle, "RWshort")
    with pytest.raises(WorkbenchError, match="leave --key out"):
        sign(bundle, "sigstore", tmp_path / "secret.key")


def test_a_tool_that_fails_leaves_no_signature(bundle: Path, tools: Path) -> None:
    (tools.parent / "minisign").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(WorkbenchError, match=r"did not sign b\.tar"):
        sign(bundle, "minisign")
    assert not signature_path(bundle, "minisign").exists()


def test_an_old_signature_is_not_taken_for_a_new_one(bundle: Path, tools: Path) -> None:
    signature_path(bundle, "minisign").write_text("old")
    (tools.parent / "minisign").write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(WorkbenchError, match="did not sign"):
        sign(bundle, "minisign")


@pytest.mark.skipif(shutil.which("minisign") is None, reason="minisign is not installed")
def test_minisign_itself(bundle: Path, tmp_path: Path) -> None:
    public, secret = tmp_path / "p.pub", tmp_path / "s.key"
    subprocess.run(
        ["minisign", "-G", "-W", "-p", str(public), "-s", str(secret)], check=True, capture_output=True
    )
    sign(bundle, "minisign", secret)
    assert "holds" in verify_minisign(bundle, str(public))
    assert "holds" in verify_minisign(bundle, public.read_text().splitlines()[1])
    bundle.write_bytes(bundle.read_bytes() + b"x")
    with pytest.raises(SignatureError):
        verify_minisign(bundle, str(public))
