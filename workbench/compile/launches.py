"""Which kernels a candidate launches, with what: found by running its host function on made-up addresses.

The final host module says everything a launch has: grid, block, cluster, shared memory, attributes and the
bytes of each parameter. It is interpreted (loops and all), not matched; and twice, each buffer standing at a
different address: the bytes that differ are the pointers, and each must be `address of a buffer + addend` in
both runs.
Nothing of the DSL is imported: the text is data from an untrusted child.
"""

from __future__ import annotations

import operator
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.artifact import BoundBuffer, KernelParam, Launch, Relocation
from workbench.compile.hostcode import (
    CASTS,
    POISON,
    Array,
    Function,
    HostCodeError,
    HostModule,
    Op,
    Scalar,
    Struct,
    Type,
    Value,
    decode,
    encode,
    read_module,
)
from workbench.compile.request import CompileError

MAX_STEPS = 1_500_000
MAX_LAUNCHES = 4096
MAX_STACK = 64 << 20

_STACK_BASE = 0x7F00_0000_0000
_SYMBOL_BASE = 0x7E00_0000_0000
_BUFFER_STEP = 1 << 40
_STREAM = 0x5EA0_0000_0000

_ATTRIBUTE_SIZE = 72
"""cudaLaunchAttribute: i32 id, 4 bytes of padding, 64 bytes of value."""
_COOPERATIVE, _CLUSTER, _PDL, _PREFERRED_CLUSTER = 2, 4, 6, 11
_IGNORED_ATTRIBUTES = frozenset({0})


_MALFORMED = (
    ArithmeticError,
    AssertionError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)
"""What garbled text of an untrusted child may end in besides HostCodeError."""


@dataclass(frozen=True)
class RawLaunch:
    """One launch of one interpretation: parameter bytes hold made-up addresses."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    pdl: bool
    cooperative: bool
    params: tuple[bytes, ...]


def recover_launches(
    mlir: str,
    function: str,
    parameters: Sequence[str],
    buffers: Sequence[BoundBuffer],
    *,
    default_stream: bool = False,
) -> tuple[Launch, ...]:
    """Launches of a host function in stream order.

    Args:
        mlir: text of the final host module.
        function: name of the host function in it.
        parameters: buffer name of each of its parameters, `stream` last.
        buffers: the buffers, for their sizes.
        default_stream: whether a launch may name no stream.

    Raises:
        CompileError: `compiler` if the host code holds something unknown; `user` if it launches nothing,
            reports an error, depends on addresses, or passes a pointer outside the buffers.
    """
    sizes = {b.name: b.nbytes for b in buffers}
    names = [p for p in parameters if p != "stream"]
    # Two placements in opposite order: no address of one run is explained by another buffer's in the other.
    step = max(_BUFFER_STEP, 1 << (2 * max(sizes.values(), default=1)).bit_length())
    first = {n: step * (i + 1) for i, n in enumerate(names)}
    # The low halves differ too, above the page: a parameter made of a part of an address is found as well.
    second = {n: step * (2 * len(names) - i) + 0x1357_1000 * (i + 1) for i, n in enumerate(names)}
    try:
        module = read_module(mlir)
        host = module.function(function)
        a = _Machine(module, host, parameters, first, default_stream).run()
        b = _Machine(module, host, parameters, second, default_stream).run()
    except HostCodeError as e:
        raise CompileError("compiler", f"launches cannot be recovered: {e}") from e
    except _MALFORMED as e:
        raise CompileError("compiler", f"launches cannot be recovered: malformed host code ({e})") from e
    if not a:
        raise CompileError("user", "the host function launches no kernel")
    if len(a) != len(b):
        raise CompileError("user", "the number of launches depends on the address of a buffer")
    return tuple(_merge(x, y, first, second, sizes) for x, y in zip(a, b, strict=True))


def interpret_launches(
    mlir: str, function: str, arguments: Sequence[Sequence[int] | None]
) -> tuple[RawLaunch, ...]:
    """Launches of a host function at given arguments, in stream order; nothing is relocated.

    Args:
        mlir: text of the final host module.
        function: name of the host function in it.
        arguments: of each host argument a sequence: the bits of a scalar; of a tensor its address, then its
            dynamic extents and strides in the order of its layout. None for the stream.

    Raises:
        CompileError: as `recover_launches`.
    """
    try:
        module = read_module(mlir)
        host = module.function(function)
        names = ["stream" if a is None else str(i) for i, a in enumerate(arguments)]
        given = {str(i): a for i, a in enumerate(arguments) if a is not None}
        return tuple(_Machine(module, host, names, given).run())
    except HostCodeError as e:
        raise CompileError("compiler", f"launches cannot be recovered: {e}") from e
    except _MALFORMED as e:
        raise CompileError("compiler", f"launches cannot be recovered: malformed host code ({e})") from e


def _merge(
    a: RawLaunch, b: RawLaunch, first: dict[str, int], second: dict[str, int], sizes: dict[str, int]
) -> Launch:
    shape = [(r.kernel, r.grid, r.block, r.cluster, r.smem_bytes, r.pdl, r.cooperative) for r in (a, b)]
    if shape[0] != shape[1] or [len(p) for p in a.params] != [len(p) for p in b.params]:
        raise CompileError("user", f"the launch of {a.kernel} depends on the address of a buffer")
    params = tuple(
        _relocate(a.kernel, i, x, y, first, second, sizes)
        for i, (x, y) in enumerate(zip(a.params, b.params, strict=True))
    )
    return Launch(
        kernel=a.kernel,
        grid=a.grid,
        block=a.block,
        cluster=a.cluster,
        smem_bytes=a.smem_bytes,
        pdl=a.pdl,
        cooperative=a.cooperative,
        params=params,
    )


def _relocate(
    kernel: str,
    index: int,
    a: bytes,
    b: bytes,
    first: dict[str, int],
    second: dict[str, int],
    sizes: dict[str, int],
) -> KernelParam:
    data, relocations = bytearray(a), []
    for at in range(0, len(a), 8):
        if a[at : at + 8] == b[at : at + 8]:
            continue
        x, y = (int.from_bytes(raw[at : at + 8], "little") for raw in (a, b))
        found = [
            (n, x - base)
            for n, base in first.items()
            if 0 <= x - base <= sizes[n] and x - base == y - second[n]
        ]
        if len(a[at : at + 8]) < 8 or len(found) != 1:
            raise CompileError(
                "user", f"parameter {index} of {kernel} holds at byte {at} an address that is in no buffer"
            )
        relocations.append(Relocation(offset=at, buffer=found[0][0], addend=found[0][1]))
        data[at : at + 8] = bytes(8)
    return KernelParam(data=data.hex(), relocations=tuple(relocations))


class _Machine:
    """Interpreter of one run. Host memory is a stack of allocas; kernel handles are symbols."""

    def __init__(
        self,
        module: HostModule,
        host: Function,
        parameters: Sequence[str],
        bases: Mapping[str, int | Sequence[int]],
        default_stream: bool = False,
    ) -> None:
        self._module, self._host, self._default_stream = module, host, default_stream
        self._stack = bytearray()
        self._blocks: dict[int, int] = {}
        """Size of each alloca by address."""
        self._symbols: list[str] = []
        self._launches: list[RawLaunch] = []
        self._values: dict[str, Value] = {}
        self._steps = 0
        if len(host.arguments) != len(parameters):
            raise HostCodeError(
                f"{host.name} has {len(host.arguments)} arguments for {len(parameters)} parameters"
            )
        for (name, type_), parameter in zip(host.arguments, parameters, strict=True):
            self._values[name] = _argument(
                type_, _STREAM if parameter == "stream" else bases[parameter], parameter
            )

    def run(self) -> list[RawLaunch]:
        label, arguments = "^bb0", list[Value]()
        while True:
            if label not in self._host.blocks:
                raise HostCodeError(f"there is no block {label}")
            block = self._host.blocks[label]
            if label != "^bb0":
                self._values.update(zip(block.arguments, arguments, strict=True))
            self._steps += len(block.ops)
            if self._steps > MAX_STEPS:
                raise CompileError("user", f"the host function runs more than {MAX_STEPS} operations")
            for op in block.ops[:-1]:
                self._execute(op)
            last = block.ops[-1] if block.ops else None
            match last.name if last is not None else "":
                case "br":
                    target = last.data[0]  # type: ignore[union-attr]
                case "cond_br":
                    target = last.data[0 if self._scalar(last.operands[0]) & 1 else 1]  # type: ignore[union-attr]
                case "return":
                    code = self._scalar(last.operands[0]) if last.operands else 0  # type: ignore[union-attr]
                    if code:
                        raise CompileError("user", f"the host function returns the error {code}")
                    return self._launches
                case "unreachable":
                    raise CompileError("user", "the host function ends where it says it cannot")
                case other:
                    raise HostCodeError(f"block {label} ends in llvm.{other}")
            label = target[0]
            arguments = [self._get(v) for v in target[1]]

    # Values

    def _get(self, name: str) -> Value:
        try:
            return self._values[name]
        except KeyError:
            raise HostCodeError(f"value {name} is used before it is set") from None

    def _scalar(self, name: str) -> int:
        value = self._get(name)
        if value is POISON:
            raise HostCodeError(f"the undefined value {name} decides something")
        if not isinstance(value, int):
            raise HostCodeError(f"value {name} is no scalar")
        return value

    def _execute(self, op: Op) -> None:
        handler = _HANDLERS.get(op.name)
        if handler is None:
            raise HostCodeError(f"host operation llvm.{op.name} cannot be executed: {op.text[:160]}")
        value = handler(self, op)
        if op.result is not None:
            self._values[op.result] = value

    def _binary(self, op: Op) -> Value:
        type_ = _integer(op.type, op)
        a, b = self._get(op.operands[0]), self._get(op.operands[1])
        if a is POISON or b is POISON:
            return POISON
        bits = type_.bits
        if op.name in _SHIFTS and b >= bits:
            return POISON
        if op.name in ("udiv", "urem", "sdiv", "srem") and b == 0:
            raise CompileError("user", "the host function divides by zero")
        return _ARITHMETIC[op.name](a, b, bits) & ((1 << bits) - 1)

    def _compare(self, op: Op) -> Value:
        bits = _integer(op.source_type, op).bits
        a, b = self._scalar(op.operands[0]), self._scalar(op.operands[1])
        if op.data[0] == "s":
            a, b = _signed(a, bits), _signed(b, bits)
        if op.data not in _PREDICATES:
            raise HostCodeError(f"comparison {op.data!r} is not known")
        return int(_PREDICATES[op.data](a, b))

    def _select(self, op: Op) -> Value:
        return self._get(op.operands[1] if self._scalar(op.operands[0]) & 1 else op.operands[2])

    def _cast(self, op: Op) -> Value:
        value, to, source = self._get(op.operands[0]), op.type, op.source_type
        if not isinstance(to, Scalar) or not isinstance(source, Scalar):
            raise HostCodeError(f"host operation llvm.{op.name} cannot be executed: {op.text[:160]}")
        if value is POISON:
            return POISON
        if op.name == "sext":
            value = _signed(value, source.bits)
        return value & ((1 << to.bits) - 1)

    def _extract(self, op: Op) -> Value:
        value = self._get(op.operands[0])
        for i in op.data:
            if not isinstance(value, tuple) or i >= len(value):
                raise HostCodeError(f"host operation llvm.{op.name} has a bad index: {op.text[:160]}")
            value = value[i]
        return value

    def _insert(self, op: Op) -> Value:
        def put(whole: Value, path: tuple[int, ...]) -> Value:
            if not path:
                return self._get(op.operands[0])
            if not isinstance(whole, tuple) or path[0] >= len(whole):
                raise HostCodeError(f"host operation llvm.{op.name} has a bad index: {op.text[:160]}")
            return (*whole[: path[0]], put(whole[path[0]], path[1:]), *whole[path[0] + 1 :])

        return put(self._get(op.operands[1]), op.data)

    # Memory

    def _alloca(self, op: Op) -> Value:
        assert op.type is not None
        size = op.type.size * self._scalar(op.operands[0])
        start = -(-len(self._stack) // 64) * 64
        if start + size > MAX_STACK:
            raise CompileError("user", f"the host function takes more than {MAX_STACK >> 20} MiB of stack")
        self._stack.extend(bytes(start + size + 64 - len(self._stack)))
        self._blocks[_STACK_BASE + start] = size
        return _STACK_BASE + start

    def _bytes(self, address: int, size: int) -> int:
        at = address - _STACK_BASE
        if not 0 <= at <= len(self._stack) - size:
            raise HostCodeError("the host function reads or writes memory that is not its own")
        return at

    def _load(self, op: Op) -> Value:
        address = self._scalar(op.operands[0])
        index = (address - _SYMBOL_BASE) >> 8
        if 0 <= index < len(self._symbols) and not (address - _SYMBOL_BASE) & 0xFF:
            return address  # a kernel's handle stands for its name
        assert op.type is not None
        at = self._bytes(address, op.type.size)
        return decode(op.type, bytes(self._stack[at : at + op.type.size]))

    def _store(self, op: Op) -> Value:
        assert op.type is not None
        at = self._bytes(self._scalar(op.operands[1]), op.type.size)
        self._stack[at : at + op.type.size] = encode(op.type, self._get(op.operands[0]))
        return POISON

    def _address_of(self, op: Op) -> Value:
        if op.data not in self._symbols:
            self._symbols.append(op.data)
        return _SYMBOL_BASE + (self._symbols.index(op.data) << 8)

    def _symbol(self, address: int) -> str:
        index = (address - _SYMBOL_BASE) >> 8
        if not 0 <= index < len(self._symbols):
            raise HostCodeError("a symbol is used that has no name")
        return self._symbols[index]

    def _element(self, op: Op) -> Value:
        address, type_ = self._get(op.operands[0]), op.source_type
        if address is POISON:
            return POISON
        for depth, index in enumerate(op.data):
            i = index if isinstance(index, int) else _signed(self._scalar(index[0]), index[1])
            if depth == 0:
                assert type_ is not None
                address += i * _stride(type_)
            elif isinstance(type_, Struct):
                address += type_.offset(i)
                type_ = type_.fields[i]
            elif isinstance(type_, Array):
                type_ = type_.element
                address += i * _stride(type_)
            else:
                raise HostCodeError(f"host operation llvm.{op.name} has a bad index: {op.text[:160]}")
        return address & ((1 << 64) - 1)

    # Calls

    def _trap(self, _: Op) -> Value:
        raise CompileError("user", "the host function ends in a trap")

    def _call(self, op: Op) -> Value:
        if op.data == "_cudaLaunchKernelEx" and len(op.operands) == 3:
            self._launch(*(self._scalar(v) for v in op.operands))
            return 0
        if op.data == "printf":
            raise CompileError("user", f"the launch code reports: {self._message(op)}")
        raise HostCodeError(f"the host function calls {op.data}")

    def _message(self, op: Op) -> str:
        text = self._module.strings.get(self._symbol(self._scalar(op.operands[0])), "an error").strip()
        values = list(op.operands[1:])

        def value(_: re.Match[str]) -> str:
            v = self._get(values.pop(0)) if values else POISON
            if isinstance(v, int) and v >= _SYMBOL_BASE and (v - _SYMBOL_BASE) >> 8 < len(self._symbols):
                return self._module.strings.get(self._symbol(v), "?").strip()
            return str(v)

        return re.sub(r"%(?:ll)?[dus]", value, text)

    def _launch(self, config: int, kernel: int, args: int) -> None:
        if len(self._launches) >= MAX_LAUNCHES:
            raise CompileError("user", f"the host function makes more than {MAX_LAUNCHES} launches")
        # cudaLaunchConfig_t: grid, block, dynamic shared memory, stream, attributes, their number.
        at = self._bytes(config, 56)
        gx, gy, gz, bx, by, bz = struct.unpack_from("<6I", self._stack, at)
        smem, stream, attributes, count = struct.unpack_from("<QQQi", self._stack, at + 24)
        name = self._symbol(kernel).removeprefix("kernels_")
        if stream not in (_STREAM, 0):
            raise HostCodeError(f"{name} is launched on a stream that was made on the host")
        if stream == 0 and not self._default_stream:
            raise CompileError("user", f"{name} is launched without `stream=stream`")
        found: dict[int, bytes] = {}
        for i in range(count):
            place = self._bytes(attributes + i * _ATTRIBUTE_SIZE, _ATTRIBUTE_SIZE)
            (id_,) = struct.unpack_from("<i", self._stack, place)
            found[id_] = bytes(self._stack[place + 8 : place + 72])
        unknown = found.keys() - {_COOPERATIVE, _CLUSTER, _PDL} - _IGNORED_ATTRIBUTES
        if unknown:
            what = (
                "a preferred cluster" if _PREFERRED_CLUSTER in unknown else f"launch attribute {min(unknown)}"
            )
            raise CompileError("user", f"{name} is launched with {what}, which the workbench does not model")
        cluster = struct.unpack_from("<3I", found[_CLUSTER]) if _CLUSTER in found else (1, 1, 1)
        params = []
        block = self._blocks.get(args, 0)
        for i in range(block // 8):
            (pointer,) = struct.unpack_from("<Q", self._stack, self._bytes(args + 8 * i, 8))
            if pointer not in self._blocks:
                raise HostCodeError(f"parameter {i} of {name} is not a host variable")
            size = self._blocks[pointer]
            place = self._bytes(pointer, size)
            params.append(bytes(self._stack[place : place + size]))
        self._launches.append(RawLaunch(
            kernel=name, grid=(gx, gy, gz), block=(bx, by, bz), cluster=cluster, smem_bytes=smem,
            pdl=_flag(found.get(_PDL)), cooperative=_flag(found.get(_COOPERATIVE)), params=tuple(params),
        ))  # fmt: skip


def _flag(value: bytes | None) -> bool:
    return value is not None and int.from_bytes(value[:4], "little") != 0


def _argument(type_: Type, given: int | Sequence[int], name: str) -> Value:
    """Value of a host argument: a scalar, a pointer, or a tensor's struct, whose first scalar is its pointer.

    A tensor's further scalars are its dynamic extents and strides; `given` holds them after the address.
    """
    values = [given] if isinstance(given, int) else list(given)
    if isinstance(type_, Scalar) and len(values) == 1 and (type_.kind == "p" or not isinstance(given, int)):
        return values[0] & ((1 << type_.bits) - 1)
    if (
        isinstance(type_, Struct)
        and type_.fields
        and isinstance(type_.fields[0], Scalar)
        and type_.fields[0].kind == "p"
        and _leaves(type_) == len(values)
    ):
        rest = iter(values)
        return _filled(type_, rest)
    raise HostCodeError(f"argument {name} is no tensor with a static layout")


def _leaves(type_: Type) -> int:
    if isinstance(type_, Scalar):
        return 1
    if isinstance(type_, Struct):
        return sum(_leaves(f) for f in type_.fields)
    return type_.count * _leaves(type_.element)


def _filled(type_: Type, leaves: Iterator[int]) -> Value:
    if isinstance(type_, Scalar):
        return next(leaves) & ((1 << type_.bits) - 1)
    if isinstance(type_, Struct):
        return tuple(_filled(f, leaves) for f in type_.fields)
    return tuple(_filled(type_.element, leaves) for _ in range(type_.count))


def _stride(type_: Type) -> int:
    return -(-type_.size // type_.align) * type_.align


def _integer(type_: Type | None, op: Op) -> Scalar:
    if not isinstance(type_, Scalar) or type_.kind == "f":
        raise HostCodeError(f"host operation llvm.{op.name} cannot be executed: {op.text[:160]}")
    return type_


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def _truncated(a: int, b: int) -> int:
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


_SHIFTS = frozenset({"shl", "lshr", "ashr"})
_ARITHMETIC: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda a, b, n: a + b,
    "sub": lambda a, b, n: a - b,
    "mul": lambda a, b, n: a * b,
    "udiv": lambda a, b, n: a // b,
    "urem": lambda a, b, n: a % b,
    "sdiv": lambda a, b, n: _truncated(_signed(a, n), _signed(b, n)),
    "srem": lambda a, b, n: _signed(a, n) - _signed(b, n) * _truncated(_signed(a, n), _signed(b, n)),
    "and": lambda a, b, n: a & b,
    "or": lambda a, b, n: a | b,
    "xor": lambda a, b, n: a ^ b,
    "shl": lambda a, b, n: a << b,
    "lshr": lambda a, b, n: a >> b,
    "ashr": lambda a, b, n: _signed(a, n) >> b,
    "intr.umin": lambda a, b, n: min(a, b),
    "intr.umax": lambda a, b, n: max(a, b),
    "intr.smin": lambda a, b, n: min(_signed(a, n), _signed(b, n)),
    "intr.smax": lambda a, b, n: max(_signed(a, n), _signed(b, n)),
}
_PREDICATES: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    **dict.fromkeys(("slt", "ult"), operator.lt),
    **dict.fromkeys(("sle", "ule"), operator.le),
    **dict.fromkeys(("sgt", "ugt"), operator.gt),
    **dict.fromkeys(("sge", "uge"), operator.ge),
}
_HANDLERS: dict[str, Callable[[_Machine, Op], Any]] = {
    "mlir.constant": lambda _, op: op.data,
    "mlir.addressof": _Machine._address_of,
    "intr.trap": _Machine._trap,
    "icmp": _Machine._compare,
    "select": _Machine._select,
    "getelementptr": _Machine._element,
    "load": _Machine._load,
    "store": _Machine._store,
    "alloca": _Machine._alloca,
    "extractvalue": _Machine._extract,
    "insertvalue": _Machine._insert,
    "call": _Machine._call,
    **dict.fromkeys(_ARITHMETIC, _Machine._binary),
    **dict.fromkeys(CASTS, _Machine._cast),
}
