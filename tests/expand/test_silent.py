"""Steps that keep things in unusual places are right or refused, and never wrong in silence.

Each row is the smallest step that shows a fault of its kind. It runs on one device and, compiled, on four simulated
ranks; after each of six calls all that the step has in Python is compared, by a walker that shares no code with spmd
(`tests/audit`).
"""

from __future__ import annotations

import pytest

from tests.audit.random_steps import TOP, Drawn, outcome, outcome_of

pytestmark = pytest.mark.not_audited("they are compared with one device call by call")

KEPT: dict[str, list[Drawn]] = {
    "objects of installed packages": [
        *(Drawn("installed", kind) for kind in ("count", "decay", "flip", "once", "rate")),
        *(Drawn("method of installed", kind) for kind in ("count", "flip")),
        Drawn("installed in an object", "flip"), Drawn("installed", "flip", route="model"),
        Drawn("installed", "flip", who="callback"), Drawn("installed", "decay", who="caller"),
    ],
    "objects of Python's library": [
        *(Drawn(place, kind) for place in ("UserDict", "ChainMap", "weak dict") for kind in ("count", "flip")),
        Drawn("UserDict", "count", who="caller"), Drawn("Event", "once"), Drawn("Event", "late by rate"),
        Drawn("queue", "flip"), Drawn("queue", "count", who="caller"), Drawn("StringIO", "count"),
        Drawn("StringIO", "flip", who="caller"), Drawn("ctypes", "decay"), Drawn("ctypes", "flip"),
        Drawn("shared value", "count"), Drawn("deque", "bytes"), Drawn("context variable", "slot"),
    ],
    "writes where reads are guarded": [
        *(
            Drawn(place, "flip")
            for place in (
                "slots", "slots dataclass", "argparse.Namespace", "threading.local", "function", "partial",
                "enum member", "Python module", "function's default", "globals()", "os.environ", "redirected",
                "redirected to slots", "descriptor", "numpy", "numpy objects", "array", "bytearray", "memoryview",
                "long list", "long dict", "slots in a list", "attribute of a dict", "attribute of a list", "metaclass",
                "lru_cache", "class of an object",
            )
        ),
        *(Drawn("slots", kind) for kind in ("text", "none", "dict that flips", "list that turns", "bytes", "object")),
        *(Drawn("object", kind) for kind in ("slot", "bytes")), Drawn("module attribute", "object"),
        *(Drawn("slots", "flip", who=who) for who in ("helper", "callback", "hook")),
        *(Drawn("slots", "flip", route) for route in ("argument", "default", "closure", "model", "object", "bound")),
        Drawn("dict", "dict that flips", "default"), Drawn("slots", "flip", when="second"),
    ],
    "what a capture leaves behind": [
        *(
            Drawn(place, kind)
            for place in ("slots", "argparse.Namespace", "function", "installed", "long list", "redirected")
            for kind in ("tensor", "shape", "rate", "item", "list of tensors")
        ),
        *(Drawn("new global", kind) for kind in ("tensor", "shape", "rate", "item", "late")),
    ],
    "iterators and generators": [
        *(
            Drawn(place, kind)
            for place in ("slots", "function's default", "Python module")
            for kind in ("iterator", "generator", "random", "bound next", "bound pop", "count of itertools")
        ),
        Drawn("dataclass", "bound pop"), Drawn("dict", "bound next"), Drawn("class", "generator"),
    ],
    "ways to an object": [
        *(
            Drawn("object", kind, route)
            for route in ("default", "class", "slot", "long list", "function")
            for kind in ("flip", "tensor")
        ),
        Drawn("object", "flip", "argument", "hook"), Drawn("SimpleNamespace", "list that turns", "argument", "hook"),
        *(Drawn("dataclass", kind, "argument", "hook") for kind in ("tensor", "text", "count")),
        Drawn("installed", "list of tensors", "argument", "hook"), Drawn("object", "tensor", "slot", "caller"),
        Drawn("property", "set", "default"),
        Drawn("dict", "rate", "slot", "hook"), Drawn("optimizer group", "list of tensors"),
        Drawn("optimizer group", "dict"), Drawn("optimizer group", "deleted"), Drawn("optimizer state", "set"),
        Drawn("optimizer attribute", "array"), Drawn("attribute of a parameter", "bytes"),
        Drawn("read buffer", "once"),
    ],
    "flags of comparisons": [
        *(
            Drawn(place, kind)
            for place in ("module attribute", "slots", "object", "dict", "global")
            for kind in ("late", "late by rate", "late by loss")
        ),
    ],
}  # fmt: skip

CASES = [(name, drawn) for name, several in KEPT.items() for drawn in several]


@pytest.mark.parametrize("sharded", [False, True], ids=["dp", "sharded"])
@pytest.mark.parametrize("drawn", [drawn for _, drawn in CASES], ids=[f"{name}: {each.title}" for name, each in CASES])
def test_what_a_step_keeps_is_right_or_refused(drawn, sharded):
    found = outcome(drawn.on_shards(sharded))
    assert found.word in ("right", "refused"), f"{found.text}\n\n{drawn}"


INSTALLED = KEPT["objects of installed packages"]


@pytest.mark.parametrize("drawn", INSTALLED, ids=[each.title for each in INSTALLED])
def test_numbers_of_installed_packages_are_right(drawn):
    found = outcome(drawn)
    assert found.word == "right", f"{found.text}\n\n{drawn}"


WRITTEN = {
    "an append to a default list beside a count": """
m.d = {"k": 0}
def step(m, opt, x, i, seen=[]):
    opt.zero_grad()
    seen.append(1)
    m.d["k"] += 1
    loss = m(x).square().mean() * len(seen) * m.d["k"]
    loss.backward()
    opt.step()
    return loss.detach()
""",
    "an append to a list of an object in slots beside a count": """
S = Slots([])
m.d = {"k": 0}
def step(m, opt, x, i):
    S.k.append(1)
    m.d["k"] += 1
    return m(x).square().mean().detach() * len(S.k) * m.d["k"]
""",
    "a list that an attribute is set to, and was not there": """
def step(m, opt, x, i):
    m.calls = [*getattr(m, "calls", []), 1]
    return m(x).square().mean().detach() * len(m.calls)
""",
    "a draw from an iterator in slots beside a count": """
S = Slots(iter(range(1, 30)))
m.d = {"k": 0}
def step(m, opt, x, i):
    m.d["k"] += 1
    return m(x).square().mean().detach() * next(S.k) * m.d["k"]
""",
    "a pop in an installed object beside a count": """
S = audit_installed.Box(list(range(1, 30)))
m.d = {"k": 0}
def step(m, opt, x, i):
    m.d["k"] += 1
    return m(x).square().mean().detach() * S.n.pop() * m.d["k"]
""",
    "an argument that a helper reads as a global": """
S = Plain(1)
ARGUMENTS = (S,)
def helper():
    return S.k
def step(m, opt, x, i, s):
    s.k = (s.k + 1) % 2
    return m(x).square().mean().detach() * helper()
""",
    "a list of the arguments that a hook reads": """
S = [1.0]
ARGUMENTS = (S,)
m.a.register_forward_hook(lambda module, given, out: out * len(S))
def step(m, opt, x, i, s):
    s.append(2.0)
    return m(x).square().mean().detach()
""",
    "one argument given twice": """
S = torch.ones(2, dtype=torch.float64)
ARGUMENTS = S, S
def step(m, opt, x, i, a, b):
    return (a * 2 if a is b else a * 3) + m(x).sum().detach()
""",
    "two arguments that are equal": """
ARGUMENTS = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
def step(m, opt, x, i, a, b):
    return (a * 2 if a is b else a * 3) + m(x).sum().detach()
""",
    "a gradient of an argument": """
S = torch.ones(2, dtype=torch.float64)
ARGUMENTS = (S,)
def step(m, opt, x, i, a):
    a.requires_grad_()
    loss = (m(x) * a).square().mean()
    loss.backward()
    return loss.detach()
""",
    "requires_grad of an argument": """
S = torch.ones(2, dtype=torch.float64)
ARGUMENTS = (S,)
def step(m, opt, x, i, a):
    a.requires_grad_(i % 2 == 0)
    return m(x).sum().detach() * (2.0 if a.requires_grad else 1.0)
""",
    "a tag of an argument": """
S = torch.ones(2, dtype=torch.float64)
ARGUMENTS = (S,)
def step(m, opt, x, i, a):
    a.tag = getattr(a, "tag", 0) + 1
    return m(x).sum().detach() * a.tag
""",
    "a flag of an argument": """
S = torch.ones(2, dtype=torch.float64)
ARGUMENTS = (S,)
def step(m, opt, x, i, a):
    a.tag = not getattr(a, "tag", False)
    return m(x).sum().detach() * (2.0 if a.tag else 1.0)
""",
    "a global that is deleted": """
N = 1
def between(x, i):
    global N
    N = 1
def step(m, opt, x, i):
    global N
    found = "N" in globals()
    if found:
        del N
    return m(x).sum().detach() * (2.0 if found else 1.0)
""",
    "a global that is deleted once": """
N = 1
def step(m, opt, x, i):
    global N
    found = "N" in globals()
    if found:
        del N
    return m(x).sum().detach() * (2.0 if found else 1.0)
""",
    "a shape that is returned": """
def step(m, opt, x, i):
    return m(x).sum().detach(), x.shape
""",
    "a shape that is kept": """
def step(m, opt, x, i):
    m.shape = x.shape
    return m(x).sum().detach() * (2.0 if isinstance(m.shape, torch.Size) else 1.0)
""",
    "an attribute of an object that is deleted": """
S = Plain(1)
def step(m, opt, x, i):
    found = hasattr(S, "k")
    if found:
        del S.k
    return m(x).sum().detach() * (2.0 if found else 1.0)
""",
    "a slot that is deleted": """
S = Slots(1)
def step(m, opt, x, i):
    found = hasattr(S, "k")
    if found:
        del S.k
    return m(x).sum().detach() * (2.0 if found else 1.0)
""",
}


@pytest.mark.parametrize("sharded", [False, True], ids=["dp", "sharded"])
@pytest.mark.parametrize("name", WRITTEN)
def test_effects_are_right_or_refused(name, sharded):
    found = outcome_of(TOP + WRITTEN[name], sharded)
    assert found.word in ("right", "refused"), f"{found.text}\n{WRITTEN[name]}"
