"""Choose places of the package at random and change each: a comparison, a constant, a condition, a statement.

A hash of its content selects a mutant, so changes of other code keep the sample.
"""

import ast
import hashlib
from collections import defaultdict
from itertools import islice
from pathlib import Path
from typing import NamedTuple

SEED = "1"
PER_ROOM = 15
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}


class Mutant(NamedTuple):
    file: str  # below distgpt/
    function: str  # its qualified name; "" at the level of the module
    kind: str
    start: int  # range of replaced characters
    end: int
    old: str
    new: str
    count: int  # number among mutants with the same text in the same function

    @property
    def name(self):
        """Return a name that is stable if other parts of the file change."""
        old = " ".join(self.old.split())
        more = f" ({self.count})" if self.count else ""
        return f"{self.file}:{self.function}: {self.kind}: {old[:90]}{more} -> {self.new}"

    @property
    def room(self):
        parts = self.file.split("/")
        if len(parts) == 1:
            return "distgpt"
        return "/".join(parts[:2]) if parts[0] == "core" and len(parts) > 2 else parts[0]


def mutants_of(path, root):
    """Return all mutants of one file."""
    text = path.read_text()
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    data, found, seen = text.encode(), [], defaultdict(int)
    file = path.relative_to(root).as_posix()

    def place(node):
        return (lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset)

    def add(function, kind, node, new, last=None):
        """Add a mutant whose text replaces a node, or all from `node` to `last`."""
        start, end = place(node)[0], place(last or node)[1]
        old = data[start:end].decode()
        if new == old:
            return
        key = function, kind, old
        found.append(Mutant(file, function, kind, start, end, old, new, seen[key]))
        seen[key] += 1

    def source(node):
        start, end = place(node)
        return data[start:end].decode()

    def visit(node, function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                visit(decorator, function)
            name = f"{function}.{node.name}" if function else node.name
            if not isinstance(node, ast.ClassDef):
                for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
                    visit(default, name)
            for statement in node.body:
                visit(statement, name)
            return
        if isinstance(node, ast.AnnAssign):
            if node.value:
                visit(node.value, function)
            return
        if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
            return
        mutate(node, function)
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    def mutate(node, function):
        match node:
            case ast.Compare(ops=[operator]):
                changed = ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators)
                add(function, "comparison", node, f"({ast.unparse(changed)})")
            case ast.Constant(value=bool()):
                add(function, "constant", node, repr(not node.value))
            case ast.Constant(value=int() | float()):
                add(function, "constant", node, repr(node.value + 1))
            case ast.BoolOp():
                other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
                add(function, "condition", node, f"({ast.unparse(ast.BoolOp(other, node.values))})")
            case ast.UnaryOp(op=ast.Not()):
                add(function, "condition", node, f"({source(node.operand)})")
            case ast.BinOp() if type(node.op) in OPERATORS:
                changed = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
                add(function, "arithmetic", node, f"({ast.unparse(changed)})")
            case ast.If() | ast.IfExp() | ast.While():
                add(function, "condition", node.test, "False")
                if not isinstance(node, ast.While):
                    add(function, "condition", node.test, "True")
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
                add(function, "statement", node, "pass")
            case ast.Return(value=ast.expr()) if not isinstance(node.value, ast.Constant):
                add(function, "return", node, "return None")
        if isinstance(node, ast.Call) and len(node.args) >= 2:
            first, second = node.args[:2]
            if not any(isinstance(each, ast.Starred) for each in (first, second)):
                between = data[place(first)[1] : place(second)[0]].decode()
                add(function, "arguments", first, source(second) + between + source(first), second)

    visit(ast.parse(text), "")
    return found


def changed(mutant, data):
    """Return the content of the file with this mutant."""
    return (data[: mutant.start] + mutant.new.encode() + data[mutant.end :]).decode()


def compiles(mutant, data):
    try:
        compile(changed(mutant, data), mutant.file, "exec")
    except SyntaxError:
        return False
    return True


def sample(root, per_room=PER_ROOM, seed=SEED):
    """Return `per_room` mutants of each directory, including each directory in core/."""
    rooms = defaultdict(list)
    for path in sorted(Path(root).rglob("*.py")):
        for mutant in mutants_of(path, root):
            rooms[mutant.room].append(mutant)
    chosen = []
    for room in sorted(rooms):
        by_hash = sorted(rooms[room], key=lambda m: hashlib.sha256(f"{seed} {m.name}".encode()).digest())
        chosen += islice((m for m in by_hash if compiles(m, (Path(root) / m.file).read_bytes())), per_room)
    return chosen
