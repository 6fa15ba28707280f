"""Names inside a kernel: `{ }` scopes, register ranges, and unique new names for what they declare."""

from __future__ import annotations

from workbench.isa.ptx.model import Reg, Symbol


class Names:
    """Hands out names that are unique in one kernel: the name itself, or with `$1`, `$2` ... added."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next: dict[str, int] = {}

    def reserve(self, name: str) -> None:
        """Take a name that must keep its spelling (parameters, module symbols)."""
        self._taken.add(name)

    def unique(self, name: str) -> str:
        """Return a name nobody has."""
        if name not in self._taken:
            self._taken.add(name)
            return name
        n = self._next.get(name, 1)
        while (candidate := f"{name}${n}") in self._taken:
            n += 1
        self._next[name] = n + 1
        self._taken.add(candidate)
        return candidate


class Scope:
    """One `{ }` scope. Ranges such as `%r<100>` are expanded only for the members that are used."""

    def __init__(self, parent: Scope | None, names: Names, registers: dict[str, str]) -> None:
        self.parent, self._names, self._registers = parent, names, registers
        self.values: dict[str, Reg | Symbol] = {}
        self.labels: dict[str, str] = {}
        self._ranges: dict[str, list[tuple[int, str]]] = {}
        self._cache: dict[str, Reg | Symbol] = {}

    def declare_register(self, name: str, type_: str) -> bool:
        """Declare one register; False if the scope has the name already."""
        if name in self.values:
            return False
        unique = self._names.unique(name)
        self._registers[unique] = type_
        self.values[name] = Reg(unique)
        self._cache[name] = self.values[name]
        return True

    def declare_range(self, prefix: str, count: int, type_: str) -> None:
        """Declare `prefix<count>`."""
        self._ranges.setdefault(prefix, []).append((count, type_))
        self._cache = dict(self.values)

    def declare_symbol(self, name: str) -> str | None:
        """Declare a variable and return its unique name; None if the scope has the name already."""
        if name in self.values:
            return None
        unique = self._names.unique(name)
        self.values[name] = Symbol(unique)
        self._cache[name] = self.values[name]
        return unique

    def declare_label(self, name: str) -> str | None:
        """Declare a label and return its unique name; None if the scope has it already."""
        if name in self.labels:
            return None
        self.labels[name] = self._names.unique(name)
        return self.labels[name]

    def find(self, name: str) -> Reg | Symbol | None:
        """The register or variable a name means here, or None. Names are declared before they are used."""
        found = self._cache.get(name)
        if found is None:
            found = self._search(name)
            if found is not None:
                self._cache[name] = found
        return found

    def _search(self, name: str) -> Reg | Symbol | None:
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            type_ = scope._range_type(name)
            if type_ is not None:
                scope.declare_register(name, type_)
                return scope.values[name]
            scope = scope.parent
        return None

    def _range_type(self, name: str) -> str | None:
        """Type of the member `name` of a range declared here; `r1<10>` has `r10` to `r19`."""
        split = len(name)
        while self._ranges and split > 0 and name[split - 1].isdigit() and len(name) - split < 18:
            split -= 1
            digits = name[split:]
            if digits[0] == "0" and len(digits) > 1:
                continue
            for count, type_ in self._ranges.get(name[:split], ()):
                if int(digits) < count:
                    return type_
        return None

    def find_label(self, name: str) -> str | None:
        """The label a name means here, or None; labels may be used before they stand."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None
