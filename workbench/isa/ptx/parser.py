"""PTX text to data: the dialects of nvcc and CuTe DSL, inline assembly and its scopes (ISA ch. 4, 5, 11)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from workbench.isa.ptx.body import BodyParser
from workbench.isa.ptx.constants import ConstantParser
from workbench.isa.ptx.lexer import PtxSyntaxError, Tokens, is_number
from workbench.isa.ptx.model import Kernel, Module, Param, Variable
from workbench.isa.ptx.variables import TYPE_BYTES, parse_variables

_LINKAGE = frozenset((".visible", ".weak", ".extern", ".common"))
_SPACES = frozenset((".global", ".const", ".shared", ".local", ".tex"))
_GENERIC_SPACES = frozenset((".global", ".const", ".shared", ".local", ".param"))


@lru_cache(maxsize=16)
def parse(text: str) -> Module:
    """Parse a PTX module; the modules asked for last are kept, as simulator, audit and cost model share them.

    Registers and labels of inner scopes get unique names, `.loc` becomes the instruction's source position,
    debug sections are skipped, bodies of `.func` are skipped (the name is kept).

    Raises:
        PtxSyntaxError: with the line and what was expected.
    """
    return _ModuleParser(text).parse()


class _ModuleParser:
    def __init__(self, text: str) -> None:
        self.tokens = Tokens(text)
        self.at = 0
        self.files = self._all_files()
        self.variables: list[Variable] = []
        self.kernels: list[Kernel] = []
        self.functions: dict[str, None] = {}

    # -- helpers ---------------------------------------------------------------------------------

    def _fail(self, expected: str) -> PtxSyntaxError:
        found = self.tokens.text[self.at] or "the end of the text"
        return PtxSyntaxError(self.tokens.line(self.at), f"expected {expected}, found {found[:60]!r}")

    def _next(self) -> str:
        token = self.tokens.text[self.at]
        if token:
            self.at += 1
        return token

    def _expect(self, token: str, what: str | None = None) -> None:
        if self.tokens.text[self.at] != token:
            raise self._fail(what or repr(token))
        self.at += 1

    def _name(self, what: str) -> str:
        token = self.tokens.text[self.at]
        if not token or not (token[0].isalpha() or token[0] in "_$%") or "." in token:
            raise self._fail(what)
        self.at += 1
        return token

    def _constant(self) -> int:
        parser = ConstantParser(self.tokens, self.at)
        value = parser.parse()
        if value.kind != "i":
            raise self._fail("an integer")
        self.at = parser.at
        return value.value

    def _dimensions(self) -> tuple[int, ...]:
        values = [self._constant()]
        while self.tokens.text[self.at] == ",":
            self.at += 1
            values.append(self._constant())
        return tuple(values)

    def _skip_group(self, opening: str, closing: str) -> None:
        self._expect(opening)
        depth = 1
        while depth:
            token = self._next()
            if not token:
                raise self._fail(repr(closing))
            depth += (token == opening) - (token == closing)

    def _string(self, what: str) -> str:
        token = self.tokens.text[self.at]
        if not token.startswith('"'):
            raise self._fail(what)
        self.at += 1
        return token[1:-1]

    # -- module ----------------------------------------------------------------------------------

    def parse(self) -> Module:
        version, target, size = self._header()
        while self.tokens.text[self.at]:
            self._directive()
        return Module(
            version=version,
            target=target,
            address_size=size,
            variables=tuple(self.variables),
            kernels=tuple(self.kernels),
            declared_functions=tuple(self.functions),
        )

    def _header(self) -> tuple[tuple[int, int], str, int]:
        self._expect(".version", "'.version' at the start of the module")
        major, _, minor = self.tokens.text[self.at].partition(".")
        if not (major.isdigit() and minor.isdigit() and len(major) < 4 and len(minor) < 4):
            raise self._fail("a version such as 9.4")
        self.at += 1
        self._expect(".target", "'.target' after '.version'")
        target = self._name("a target such as sm_103a")
        while self.tokens.text[self.at] == ",":
            self.at += 1
            self._name("a target option")
        size = 32
        if self.tokens.text[self.at] == ".address_size":
            self.at += 1
            size = self._constant()
            if size not in (32, 64):
                self.at -= 1
                raise self._fail("address size 32 or 64")
        return (int(major), int(minor)), target, size

    def _directive(self) -> None:
        token = self.tokens.text[self.at]
        if token in _LINKAGE:
            self.at += 1
            token = self.tokens.text[self.at]
            if token == ".entry":
                self._entry()
            elif token == ".func":
                self._function()
            elif token in _SPACES:
                self._variables(extern=self.tokens.text[self.at - 1] == ".extern")
            else:
                raise self._fail("'.entry', '.func' or a state space after the linkage directive")
        elif token == ".entry":
            self._entry()
        elif token == ".func":
            self._function()
        elif token in _SPACES:
            self._variables(extern=False)
        elif token == ".file":
            self._file()
        elif token == ".section":
            while self.tokens.text[self.at] not in ("{", ""):
                self.at += 1
            self._skip_group("{", "}")
        elif token == ".pragma":
            self.at += 1
            self._string("a pragma string")
            self._expect(";")
        elif token == ".alias":
            self.at += 1
            self.functions[self._name("an alias name")] = None
            self._expect(",")
            self._name("a function name")
            self._expect(";")
        elif token.startswith("@@") or token == ";":
            self.at += 1
        else:
            raise self._fail("a module directive such as '.entry', '.func', '.global' or '.file'")

    def _all_files(self) -> dict[int, str]:
        """File names by number; CuTe DSL writes them after the kernels that refer to them."""
        text = self.tokens.text
        return {
            int(text[n + 1]): text[n + 2][1:-1]
            for n, token in enumerate(text[:-2])
            if token == ".file" and text[n + 1].isdigit() and len(text[n + 1]) < 19
        }

    def _file(self) -> None:
        self.at += 1
        self._constant()
        self._string("a file name in double quotes")
        while self.tokens.text[self.at] == ",":
            self.at += 1
            self._constant()

    def _variables(self, *, extern: bool) -> None:
        found, self.at = parse_variables(self.tokens, self.at, extern=extern)
        self.variables.extend(v for v, _ in found)

    def _function(self) -> None:
        self.at += 1
        if self.tokens.text[self.at] == ".attribute":
            self.at += 1
            self._skip_group("(", ")")
        if self.tokens.text[self.at] == "(":
            self._skip_group("(", ")")
        self.functions[self._name("a function name")] = None
        if self.tokens.text[self.at] == "(":
            self._skip_group("(", ")")
        while self.tokens.text[self.at] not in ("{", ";", ""):
            self.at += 1
        if self.tokens.text[self.at] == "{":
            self._skip_group("{", "}")
        else:
            self._expect(";", "a function body or ';'")

    # -- entries ---------------------------------------------------------------------------------

    def _entry(self) -> None:
        line = self.tokens.line(self.at)
        self.at += 1
        name = self._name("a kernel name")
        params: list[Param] = []
        if self.tokens.text[self.at] == "(":
            self.at += 1
            end = 0
            while self.tokens.text[self.at] != ")":
                if params:
                    self._expect(",", "',' or ')' in the parameter list")
                param = self._param(end)
                if any(p.name == param.name for p in params):
                    self.at -= 1
                    raise self._fail("a parameter name that is not taken")
                params.append(param)
                end = param.offset + param.size
            self.at += 1
        kernel = Kernel(name, tuple(params), {}, (), (), line)
        kernel = self._performance(kernel)
        if self.tokens.text[self.at] == ";":  # a declaration
            self.at += 1
            return
        if self.tokens.text[self.at] != "{":
            raise self._fail("a performance directive, '{' or ';'")
        if any(k.name == name for k in self.kernels):
            raise PtxSyntaxError(line, f"kernel {name!r} is defined twice")
        body = BodyParser(
            self.tokens,
            self.at,
            self.files,
            [p.name for p in params],
            [v.name for v in self.variables],
            [*self.functions, *(k.name for k in self.kernels), name],
        )
        body.parse()
        self.at = body.at
        directives = dict(kernel.directives)
        if body.pragmas:
            directives["body_pragma"] = "; ".join(body.pragmas)
        self.kernels.append(
            replace(
                kernel,
                registers=body.registers,
                variables=tuple(body.variables),
                body=tuple(body.items),
                directives=directives,
                branch_targets=body.branch_targets,
            )
        )

    def _param(self, end: int) -> Param:
        self._expect(".param", "'.param' in the parameter list")
        align: int | None = None
        type_: str | None = None
        space: str | None = None
        pointer_align: int | None = None
        width = 1
        while (token := self.tokens.text[self.at]).startswith(".") and not is_number(token):
            self.at += 1
            if token == ".ptr":
                space = "generic"
                if self.tokens.text[self.at] in _GENERIC_SPACES:
                    space = self._next()[1:]
                if self.tokens.text[self.at] == ".align":
                    self.at += 1
                    pointer_align = self._alignment()
            elif token == ".align":
                align = self._alignment()
            elif token in (".v2", ".v4"):
                width = int(token[2])
            elif token[1:] in TYPE_BYTES:
                type_ = token[1:]
            else:
                self.at -= 1
                raise self._fail("a parameter type")
        if type_ is None:
            raise self._fail("a parameter type")
        name = self._name("a parameter name")
        elements = width
        while self.tokens.text[self.at] == "[":
            self.at += 1
            elements *= self._constant()
            self._expect("]")
        if not 0 <= elements < 1 << 31:
            raise self._fail("a smaller parameter")
        size = TYPE_BYTES[type_] * elements
        align = align or TYPE_BYTES[type_] * width
        return Param(name, type_, elements, align, -(-end // align) * align, size, space, pointer_align)

    def _alignment(self) -> int:
        value = self._constant()
        if value <= 0 or value & (value - 1) or value > 1 << 20:
            self.at -= 1
            raise self._fail("an alignment that is a power of two")
        return value

    def _performance(self, kernel: Kernel) -> Kernel:
        directives: dict[str, str] = {}
        shapes: dict[str, tuple[int, int, int]] = {}
        blocks: int | None = None
        while (token := self.tokens.text[self.at]).startswith("."):
            self.at += 1
            if token == ".pragma":
                text = self._string("a pragma string")
                self._expect(";")
                directives["pragma"] = f"{directives['pragma']}; {text}" if "pragma" in directives else text
                continue
            values: tuple[int, ...] = ()
            if is_number(self.tokens.text[self.at]) or self.tokens.text[self.at] == "(":
                values = self._dimensions()
            if token in (".reqntid", ".maxntid"):
                if not 1 <= len(values) <= 3:
                    raise self._fail(f"one to three extents after {token}")
                x, y, z = (*values, 1, 1)[:3]
                shapes[token] = (x, y, z)
            elif token == ".minnctapersm" and len(values) == 1:
                blocks = values[0]
            else:
                directives[token[1:]] = ", ".join(map(str, values))
        return replace(
            kernel,
            reqntid=shapes.get(".reqntid"),
            maxntid=shapes.get(".maxntid"),
            minnctapersm=blocks,
            directives=directives,
        )
