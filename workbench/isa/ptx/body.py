"""The statements of a kernel body: scopes, declarations, labels and instructions (ISA ch. 4, 9)."""

from __future__ import annotations

import re
from dataclasses import replace

from workbench.isa.ptx.constants import OPERATORS, ConstantParser
from workbench.isa.ptx.lexer import PtxSyntaxError, Tokens, is_number
from workbench.isa.ptx.model import (
    Address,
    Imm,
    Instruction,
    Label,
    Loc,
    Negated,
    Operand,
    Pair,
    Reg,
    Sink,
    Special,
    Symbol,
    TensorAddress,
    Variable,
    Vector,
)
from workbench.isa.ptx.scope import Names, Scope
from workbench.isa.ptx.variables import TYPE_BYTES, parse_variables

_SPECIAL = re.compile(
    r"%(?:n?tid|n?ctaid|(?:n?cluster|cluster_n?cta)id|cluster_n?ctarank"
    r"|laneid|n?warpid|n?smid|gridid|is_explicit_cluster|lanemask_(?:eq|le|lt|ge|gt)"
    r"|clock|clock_hi|clock64|pm[0-7](?:_64)?|envreg(?:[12]?[0-9]|3[01])|globaltimer(?:_lo|_hi)?"
    r"|reserved_smem_offset_(?:begin|end|cap|<[01]>|[01])|(?:total|aggr|dynamic)_smem_size|current_graph_exec"
    r")(?:\.[xyzw])?\Z"
)
_REGISTER_TYPES = frozenset(TYPE_BYTES) | {"pred"}
_VARIABLE_SPACES = frozenset((".shared", ".local", ".param", ".global", ".const", ".shared::cta"))
_JUMPS = frozenset(("bra", "brx", "call"))
_SINK = Sink()


def _word(token: str) -> bool:
    return bool(token) and (token[0].isalpha() or token[0] in "_$%")


class BodyParser:
    """Parses from the `{` of a body; the results are the public attributes, `at` the token after the `}`."""

    def __init__(
        self,
        tokens: Tokens,
        at: int,
        files: dict[int, str],
        params: list[str],
        variables: list[str],
        functions: list[str],
    ) -> None:
        self.tokens, self.at, self._files = tokens, at, files
        self.registers: dict[str, str] = {}
        self.variables: list[Variable] = []
        self.items: list[Instruction | Label] = []
        self.branch_targets: dict[str, tuple[str, ...]] = {}
        self.pragmas: list[str] = []
        self._used_bytes: int | None = None
        """Of the pragma that applies to the next instruction."""
        self._names = Names()
        self._outside: dict[str, Symbol] = {}
        for name in (*functions, *variables, *params):
            self._names.reserve(name)
            self._outside[name] = Symbol(name)
        self._scope = Scope(None, self._names, self.registers)
        self._opcodes: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._immediates: dict[str, Imm] = {}
        self._specials: dict[str, Special] = {}
        self._loc: Loc | None = None
        # Labels may be used before they stand: (item index, scope) of instructions, and branch target lists.
        self._pending: list[tuple[int, Scope]] = []
        self._tables: list[tuple[str, list[str], Scope, int]] = []
        self._unresolved: set[str] = set()
        self._jumping = False

    def _fail(self, expected: str) -> PtxSyntaxError:
        found = self.tokens.text[self.at] or "the end of the text"
        return PtxSyntaxError(self.tokens.line(self.at), f"expected {expected}, found {found[:60]!r}")

    # -- statements ------------------------------------------------------------------------------

    def parse(self) -> None:
        """Read the body.

        Raises:
            PtxSyntaxError: with the line and what was expected.
        """
        text = self.tokens.text
        opening = self.at
        self.at += 1
        depth = 1
        while depth:
            token = text[self.at]
            if token == "{":
                self._scope = Scope(self._scope, self._names, self.registers)
                depth += 1
                self.at += 1
            elif token == "}":
                if self._scope.parent is not None:
                    self._scope = self._scope.parent
                depth -= 1
                self.at += 1
            elif token == ";":
                self.at += 1
            elif token == "@" or _word(token):
                if text[self.at + 1] == ":" and token != "@":
                    self._label(token)
                else:
                    self._instruction()
            elif token.startswith(".") and not is_number(token):
                self._directive(token)
            elif not token:
                line = self.tokens.line(opening)
                raise PtxSyntaxError(self.tokens.line(self.at), f"the '{{' of line {line} is never closed")
            else:
                raise self._fail("an instruction, a label, a directive or '}'")
        self._resolve()

    def _label(self, name: str) -> None:
        if "." in name:
            raise self._fail("a label name without dots")
        table = self.tokens.text[self.at + 2]
        if table in (".branchtargets", ".calltargets", ".callprototype"):
            self._table(name, table)
            return
        unique = self._scope.declare_label(name)
        if unique is None:
            raise self._fail("a label that does not stand in this scope already")
        self.items.append(Label(unique, self.tokens.line(self.at)))
        self.at += 2

    def _table(self, name: str, kind: str) -> None:
        unique = self._scope.declare_symbol(name)
        if unique is None:
            raise self._fail("a name that is not taken")
        line = self.tokens.line(self.at)
        self.at += 3
        if kind != ".branchtargets":
            while self.tokens.text[self.at] not in (";", "", "}"):
                self.at += 1
        else:
            labels = [self._plain_name("a label")]
            while self.tokens.text[self.at] == ",":
                self.at += 1
                labels.append(self._plain_name("a label"))
            self._tables.append((unique, labels, self._scope, line))
        if self.tokens.text[self.at] != ";":
            raise self._fail("';'")
        self.at += 1

    def _plain_name(self, what: str) -> str:
        token = self.tokens.text[self.at]
        if not _word(token) or "." in token:
            raise self._fail(what)
        self.at += 1
        return token

    def _directive(self, token: str) -> None:
        if token == ".reg":
            self._registers()
        elif token == ".loc":
            self._location()
        elif token in _VARIABLE_SPACES:
            found, end = parse_variables(self.tokens, self.at, extern=False)
            for variable, name_at in found:
                unique = self._scope.declare_symbol(variable.name)
                if unique is None:
                    self.at = name_at
                    raise self._fail("a name that is not taken in this scope")
                self.variables.append(replace(variable, name=unique))
            self.at = end
        elif token == ".pragma":
            self.at += 1
            pragma = self.tokens.text[self.at]
            if not pragma.startswith('"'):
                raise self._fail("a pragma string")
            if pragma.startswith('"used_bytes_mask '):
                self._used_bytes = self._mask(pragma)
            else:
                self.pragmas.append(pragma[1:-1])
            self.at += 1
            if self.tokens.text[self.at] != ";":
                raise self._fail("';' after the pragma")
            self.at += 1
        else:
            raise self._fail("an instruction or one of .reg, .shared, .local, .param, .loc, .pragma")

    def _mask(self, pragma: str) -> int:
        try:
            return int(pragma[1:-1].split()[1], 0)
        except ValueError:
            raise self._fail("a number in the pragma used_bytes_mask") from None

    def _registers(self) -> None:
        text = self.tokens.text
        self.at += 1
        type_ = text[self.at][1:]
        if not text[self.at].startswith(".") or type_ not in _REGISTER_TYPES:
            raise self._fail("a register type such as .b32 or .pred")
        self.at += 1
        while True:
            name = self._plain_name("a register name")
            if text[self.at] == "<":
                self.at += 1
                count = self._integer("a register count")
                if text[self.at] != ">":
                    raise self._fail("'>'")
                self.at += 1
                self._scope.declare_range(name, count, type_)
            elif not self._scope.declare_register(name, type_):
                self.at -= 1
                raise self._fail("a register name that is not taken in this scope")
            if text[self.at] != ",":
                break
            self.at += 1
        if text[self.at] != ";":
            raise self._fail("',' or ';' after a register declaration")
        self.at += 1

    def _integer(self, what: str) -> int:
        parser = ConstantParser(self.tokens, self.at)
        value = parser.parse()
        if value.kind != "i":
            raise self._fail(what)
        self.at = parser.at
        return value.value

    def _location(self) -> None:
        text = self.tokens.text
        self.at += 1
        loc = self._place()
        if text[self.at] == ",":
            self.at += 1
            if text[self.at] != "function_name":
                raise self._fail("'function_name' in .loc")
            self.at += 1
            self._plain_name("a label of the function's name")
            if text[self.at] == "+":
                self.at += 1
                self._integer("an offset")
            if text[self.at] != ",":
                raise self._fail("','")
            self.at += 1
            if text[self.at] != "inlined_at":
                raise self._fail("'inlined_at' in .loc")
            self.at += 1
            loc = replace(loc, inlined_at=self._place())
        self._loc = loc

    def _place(self) -> Loc:
        values = []
        for what in ("a file number", "a line number", "a column number"):
            token = self.tokens.text[self.at]
            if not token.isdigit() or len(token) > 18:
                raise self._fail(what)
            self.at += 1
            values.append(int(token))
        return Loc(self._files.get(values[0], f"<file {values[0]}>"), values[1], values[2])

    # -- instructions ----------------------------------------------------------------------------

    def _instruction(self) -> None:
        tokens = self.tokens
        text = tokens.text
        first = self.at
        predicate: Reg | None = None
        negated = False
        if text[self.at] == "@":
            self.at += 1
            if text[self.at] == "!":
                negated = True
                self.at += 1
            name = text[self.at]
            value = self._scope.find(name) if _word(name) else None
            if not isinstance(value, Reg):
                raise self._fail("a declared predicate register after '@'")
            predicate = value
            self.at += 1
        token = text[self.at]
        opcode = self._opcodes.get(token)
        if opcode is None:
            if not (token and token[0].isalpha()) or "$" in token or "%" in token:
                raise self._fail("an opcode")
            base, *modifiers = token.split(".")
            opcode = self._opcodes[token] = (base, tuple(modifiers))
        self.at += 1
        operands: list[Operand] = []
        self._jumping = opcode[0] in _JUMPS
        if text[self.at] != ";":
            parse_operand = self._call_operand if opcode[0] == "call" else self._operand
            while True:
                operands.append(parse_operand())
                after = text[self.at]
                if after == ",":
                    self.at += 1
                elif after == ";":
                    break
                elif opcode[0] == "call" and after == "(":
                    continue
                else:
                    raise self._fail("',' or ';' after an operand")
        if self._unresolved:
            self._pending.append((len(self.items), self._scope))
            self._unresolved = set()
        start, end = tokens.start[first], tokens.start[self.at]
        written = tokens.source[start:end]
        if "//" in written or "/*" in written:
            written = " ".join(text[first : self.at])
        self.items.append(
            Instruction(
                opcode[0],
                opcode[1],
                tuple(operands),
                tokens.line_at(start),
                predicate,
                negated,
                self._loc,
                " ".join(written.split()) + ";",
                self._used_bytes,
            )
        )
        self._used_bytes = None
        self.at += 1

    def _call_operand(self) -> Operand:
        """`(a, b)` lists of a call become vectors."""
        text = self.tokens.text
        if text[self.at] != "(":
            return self._operand()
        self.at += 1
        elements: list[Operand] = []
        while text[self.at] != ")":
            elements.append(self._operand())
            if text[self.at] == ",":
                self.at += 1
            elif text[self.at] != ")":
                raise self._fail("',' or ')' in a list of call parameters")
        self.at += 1
        return Vector(tuple(elements))

    def _operand(self) -> Operand:
        text = self.tokens.text
        token = text[self.at]
        if token == "[":
            return self._address()
        if token == "{":
            operand: Operand = self._vector()
        elif token == "!" and _word(text[self.at + 1]):
            self.at += 1
            return Negated(self._named(text[self.at]))
        elif _word(token) and token != "WARP_SZ":
            operand = self._named(token)
        else:
            return self._immediate(token)
        if text[self.at] == "|":
            self.at += 1
            second = text[self.at]
            if not _word(second):
                raise self._fail("a register after '|'")
            return Pair(operand, self._named(second))
        return operand

    def _named(self, token: str) -> Operand:
        value = self._scope.find(token)
        if value is not None and not self._jumping:
            self.at += 1
            if isinstance(value, Symbol) and self.tokens.text[self.at] in ("+", "-"):
                return Symbol(value.name, self._integer("an offset"))
            return value
        if token == "_":
            self.at += 1
            return _SINK
        special = self._specials.get(token)
        if special is None and _SPECIAL.match(token):
            special = self._specials[token] = Special(token)
        if special is not None:
            self.at += 1
            return special
        if "." in token:
            raise self._fail("an operand (vector components such as 'v.x' are not supported)")
        if self._jumping:  # a label wins over a variable of the same name
            self._unresolved.add(token)
            self.at += 1
            return Symbol(token)
        outside = self._outside.get(token)
        if outside is not None:
            self.at += 1
            if self.tokens.text[self.at] in ("+", "-"):
                return Symbol(outside.name, self._integer("an offset"))
            return outside
        self._unresolved.add(token)
        self.at += 1
        return Symbol(token)

    def _immediate(self, token: str) -> Imm:
        following = self.tokens.text[self.at + 1] if token else ""
        if following not in OPERATORS:
            known = self._immediates.get(token)
            if known is not None:
                self.at += 1
                return known
        if not (token in ("-", "+", "(", "~", "!", "WARP_SZ") or (token and is_number(token))):
            raise self._fail("an operand")
        parser = ConstantParser(self.tokens, self.at)
        value = parser.parse()
        if parser.at == self.at + 1:
            self._immediates[token] = value
        self.at = parser.at
        return value

    def _vector(self) -> Vector:
        text = self.tokens.text
        self.at += 1
        elements: list[Operand] = []
        while text[self.at] != "}":
            token = text[self.at]
            elements.append(
                self._named(token) if _word(token) and token != "WARP_SZ" else self._immediate(token)
            )
            if text[self.at] == ",":
                self.at += 1
            elif text[self.at] != "}":
                raise self._fail("',' or '}' in a vector")
        self.at += 1
        return Vector(tuple(elements))

    def _address(self) -> Address | TensorAddress:
        text = self.tokens.text
        self.at += 1
        token = text[self.at]
        base: Reg | Symbol | None = None
        offset = 0
        if _word(token) and token != "WARP_SZ":
            value = self._named(token)
            if isinstance(value, Symbol):
                base, offset = Symbol(value.name), value.offset
            elif isinstance(value, Reg):
                base = value
            else:
                self.at -= 1
                raise self._fail("a register, a symbol or a number in an address")
        else:
            offset = self._integer("an address")
        if base is not None and text[self.at] in ("+", "-"):
            offset += self._integer("an offset")
        address = Address(base, offset)
        if text[self.at] == ",":
            self.at += 1
            coordinates = self._coordinates()
            offsets: tuple[Operand, ...] = ()
            if text[self.at] == ",":
                self.at += 1
                offsets = self._coordinates()
            self._close_address()
            return TensorAddress(address, coordinates, offsets)
        self._close_address()
        return address

    def _close_address(self) -> None:
        if self.tokens.text[self.at] != "]":
            raise self._fail("']' or an offset in an address")
        self.at += 1

    def _coordinates(self) -> tuple[Operand, ...]:
        if self.tokens.text[self.at] == "{":
            return self._vector().elements
        return (self._operand(),)

    # -- labels ----------------------------------------------------------------------------------

    def _resolve(self) -> None:
        """Give every symbol that was unknown when it was read its label, variable or function."""
        for index, scope in self._pending:
            item = self.items[index]
            assert isinstance(item, Instruction)
            self.items[index] = replace(
                item, operands=tuple(self._resolved(o, scope, item) for o in item.operands)
            )
        for name, labels, scope, line in self._tables:
            found = []
            for label in labels:
                unique = scope.find_label(label)
                if unique is None:
                    raise PtxSyntaxError(line, f"label {label!r} does not exist")
                found.append(unique)
            self.branch_targets[name] = tuple(found)

    def _resolved(self, operand: Operand, scope: Scope, item: Instruction) -> Operand:
        if isinstance(operand, Symbol):
            return self._meaning(operand, scope, item)
        if isinstance(operand, Vector):
            return Vector(tuple(self._resolved(e, scope, item) for e in operand.elements))
        if isinstance(operand, Pair):
            return Pair(
                self._resolved(operand.first, scope, item), self._resolved(operand.second, scope, item)
            )
        if isinstance(operand, Negated):
            return Negated(self._resolved(operand.operand, scope, item))
        if isinstance(operand, Address) and isinstance(operand.base, Symbol):
            base = self._meaning(operand.base, scope, item)
            assert isinstance(base, (Reg, Symbol))
            return Address(base, operand.offset)
        if isinstance(operand, TensorAddress):
            base_address = self._resolved(operand.base, scope, item)
            assert isinstance(base_address, Address)
            return TensorAddress(
                base_address,
                tuple(self._resolved(c, scope, item) for c in operand.coordinates),
                tuple(self._resolved(c, scope, item) for c in operand.offsets),
            )
        return operand

    def _meaning(self, symbol: Symbol, scope: Scope, item: Instruction) -> Operand:
        name = symbol.name
        jumps = item.opcode in _JUMPS
        if jumps and (label := scope.find_label(name)) is not None:
            return Symbol(label)
        found = scope.find(name)
        if found is not None:
            return Symbol(found.name, symbol.offset) if isinstance(found, Symbol) else found
        if name in self._outside or name in self._unique_symbols():
            return symbol
        if (label := scope.find_label(name)) is not None:
            return Symbol(label, symbol.offset)
        what = "label or function" if jumps else "name"
        raise PtxSyntaxError(item.line, f"{what} {name!r} is not declared")

    def _unique_symbols(self) -> set[str]:
        return {v.name for v in self.variables}
