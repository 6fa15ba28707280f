"""Signatures of bundles, made and checked by tools that exist for it: minisign, or the sigstore client.

The workbench holds no key and asks for no password: the tool talks to the person. Where a tool is missing the
request is refused; a signature is never taken for good because nothing could check it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from workbench.environment import kept
from workbench.errors import MissingToolError, WorkbenchError
from workbench.export.evidence.check import SIGNATURES, SignatureError

TOOLS = tuple(SIGNATURES)
_INSTALL = {
    "minisign": "install it from your system's packages (apt, brew, ...)",
    "sigstore": "pip install sigstore",
}
_PUBLIC_KEY = re.compile(r"RW[A-Za-z0-9+/]{54}")
_SECONDS = 120


def signature_path(bundle: Path, tool: str) -> Path:
    """Where a bundle's signature lies: beside it."""
    return bundle.with_name(bundle.name + SIGNATURES[tool])


def find_tool(tool: str) -> str:
    """The tool's path; raises MissingToolError with what to do."""
    found = shutil.which(tool)
    if found is None:
        raise MissingToolError(f"{tool} is not installed, so that no signature can be made or checked; "
                               f"{_INSTALL[tool]}, or leave the signature out")  # fmt: skip
    return found


def sign(bundle: Path, tool: str, key: Path | None = None) -> Path:
    """Sign a bundle and return the signature's file. The tool may ask for a password or open a browser.

    Args:
        bundle: the file to sign.
        tool: `minisign` or `sigstore`.
        key: minisign's secret key; by default its own default.

    Raises:
        MissingToolError: if the tool is not installed.
        WorkbenchError: if it fails, or a key is given that it does not take.
    """
    program, target = find_tool(tool), signature_path(bundle.resolve(), tool)
    if tool == "minisign":
        secret = ["-s", str(key)] if key is not None else []
        command = [program, "-S", *secret, "-m", str(bundle.resolve()), "-x", str(target), "-t", bundle.name]
    else:
        if key is not None:
            raise WorkbenchError("sigstore signs with an identity, not with a key; leave --key out")
        command = [program, "sign", "--overwrite", "--bundle", str(target), str(bundle.resolve())]
    target.unlink(missing_ok=True)
    try:
        # The tool gets the person's own environment: keys, agents and identities are its business. What it
        # says goes to standard error: standard output holds the document.
        done = subprocess.run(command, stdout=2, check=False)
    except OSError as e:
        raise WorkbenchError(f"{tool} does not run: {e.strerror or e}") from e
    if done.returncode != 0 or not target.is_file():
        raise WorkbenchError(
            f"{tool} did not sign {bundle.name} (status {done.returncode}); see what it said"
        )
    return target


def verify_minisign(bundle: Path, public_key: str) -> str:
    """Check the minisign signature beside a bundle; returns who signed, for people.

    Args:
        bundle: the file.
        public_key: the key itself (`RW...`), or a file that holds it.

    Raises:
        SignatureError: if there is no signature, or it does not hold.
        MissingToolError: if minisign is not installed.
        WorkbenchError: if the key cannot be read.
    """
    program = find_tool("minisign")
    if _PUBLIC_KEY.fullmatch(public_key):
        given = ["-P", public_key]
    elif Path(public_key).is_file():
        given = ["-p", public_key]
    else:
        raise WorkbenchError(
            f"{public_key!r} is neither a minisign public key (RW...) nor a file that holds one"
        )
    path = _present(bundle, "minisign")
    _run([program, "-V", "-q", *given, "-m", str(bundle.resolve()), "-x", str(path)], path)
    who = public_key if given[0] == "-P" else f"in {public_key}"
    return f"minisign signature {path.name} holds for the key {who}"


def verify_sigstore(bundle: Path, identity: str, issuer: str) -> str:
    """Check the sigstore signature beside a bundle, offline; returns who signed, for people.

    Args:
        bundle: the file.
        identity: of the signer, for instance an address.
        issuer: URL of the provider that vouches for the identity.

    Raises:
        SignatureError: if there is no signature, or it does not hold.
        MissingToolError: if the sigstore client is not installed.
    """
    program, path = find_tool("sigstore"), _present(bundle, "sigstore")
    command = [program, "verify", "identity", "--offline", "--bundle", str(path), "--cert-identity", identity,
               "--cert-oidc-issuer", issuer, str(bundle.resolve())]  # fmt: skip
    _run(command, path)
    return f"sigstore signature {path.name} holds for {identity}, vouched for by {issuer}"


def _present(bundle: Path, tool: str) -> Path:
    path = signature_path(bundle.resolve(), tool)
    if not path.is_file():
        raise SignatureError(f"there is no {path.name} beside the bundle")
    return path


def _run(command: Sequence[str], signature: Path) -> None:
    tool = Path(command[0]).name
    try:
        done = subprocess.run(
            command,
            env=kept(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise WorkbenchError(f"{tool} does not run: {e}") from e
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise SignatureError(f"{signature.name} does not hold: {tool} says: {said}")
