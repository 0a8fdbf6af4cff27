"""Where a random step keeps a value, of which kind it is, and how the step gets to it: tables of Python text.

    PLACES["slots"].get      "{s}.n"
    KINDS["flip"].new        "(v + 1) % 2"
    ROUTES["closure"]        how the holder `{s}` is named in the step

In the texts `{s}` is the holder of the value, `{v}` what is set, `{init}` the first value, and `m`, `opt`, `x`, `i`,
`loss` and `v` are variables of the step: the model, its optimiser, the batch, the number of the call, the loss, and the
value before.
"""

from __future__ import annotations

from dataclasses import dataclass

NUMBERS = "count", "decay", "flip", "once", "shape", "rate", "late", "late by rate", "item", "late by loss"
INTS = "count", "flip", "once", "shape", "late"
TEXTS = "text"
TENSORS = "tensor"


@dataclass(frozen=True)
class Kind:
    """A kind of value. init: the first one. new: an expression for the next; or do: a statement that changes the value,
    which is `{n}` in it. use: what the loss is multiplied with, of the value `v`."""

    init: str
    use: str
    new: str = ""
    do: str = ""


KINDS = {
    "count": Kind("0", "(1 + v)", "v + 1"),
    "decay": Kind("1.0", "v", "v * 0.5"),
    "flip": Kind("1", "(1 + v)", "(v + 1) % 2"),
    "once": Kind("False", "(2.0 if v else 1.0)", "True"),
    "shape": Kind("1", "v", "x.shape[0]"),
    "rate": Kind("1.0", "(1 + v)", 'opt.param_groups[0]["lr"]'),
    "late": Kind("False", "(2.0 if v else 1.0)", "x.shape[0] < 6"),
    "late by rate": Kind("False", "(2.0 if v else 1.0)", 'opt.param_groups[0]["lr"] < 0.02'),
    "item": Kind("1.0", "v", "loss.item()"),
    "late by loss": Kind("False", "(2.0 if v else 1.0)", "loss.item() < 2.5"),
    "text": Kind('"a"', '(2.0 if v == "b" else 1.0)', '"b" if v == "a" else "a"'),
    "none": Kind("None", "(1.0 if v is None else 2.0)", "3 if v is None else None"),
    "tensor": Kind("torch.ones((), dtype=torch.float64)", "(1 + v)", "loss.detach()"),
    "tensors": Kind("(torch.ones((), dtype=torch.float64),)", "(1 + v[0])", "(loss.detach(), v[0])[:2]"),
    "list": Kind("[]", "(1 + len(v))", do="{n}.append(1)"),
    "list of tensors": Kind("[]", "(1 + sum(v))", do="{n}.append(loss.detach())"),
    "list that turns": Kind("[0.5, 1.0, 2.0]", "v[0]", do="{n}.append({n}.pop(0))"),
    "dict": Kind("{}", '(1 + v.get("k", 0))', do='{n}["k"] = {n}.get("k", 0) + 1'),
    "dict that flips": Kind('{"k": 1}', '(1 + v["k"])', do='{n}["k"] = ({n}["k"] + 1) % 2'),
    "dict of tensors": Kind("{}", "(1 + sum(v.values()))", do='{n}["k"] = loss.detach()'),
    "deleted": Kind('{"k": 1}', '(2.0 if "k" in v else 1.0)', do='{n}.pop("k", None)'),
    "set": Kind("set()", "(1 + len(v))", do="{n}.add(len({n}))"),
    "array": Kind("numpy.ones(2)", "float(v[0])", do="{n}[0] *= 0.5"),
    "bytes": Kind("bytearray(2)", "(1 + v[0])", do="{n}[0] = ({n}[0] + 1) % 2"),
    "slot": Kind("Slots(1)", "(1 + v.k)", do="{n}.k = ({n}.k + 1) % 2"),
    "object": Kind("Plain(1)", "(1 + v.k)", do="{n}.k = ({n}.k + 1) % 2"),
    "iterator": Kind("iter([float(k) for k in range(1, 40)])", "next(v)", do="next({n})"),
    "count of itertools": Kind("itertools.count(1)", "next(v)", do="next({n})"),
    "generator": Kind("(float(k) for k in range(1, 40))", "next(v)", do="next({n})"),
    "random": Kind("random.Random(0)", "v.random()", do="{n}.random()"),
    "bound next": Kind("iter([float(k) for k in range(1, 40)]).__next__", "v()", do="{n}()"),
    "bound pop": Kind("[float(k) for k in range(1, 40)].pop", "v()", do="{n}()"),
    "deque": Kind("collections.deque([0.5, 1.0, 2.0])", "v[0]", do="{n}.rotate(1)"),
}


@dataclass(frozen=True)
class Place:
    """A place for a value. setup: statements at the top that make the holder `S`. get: an expression. put: a statement.
    fits: the kinds of values, or all. routed: whether the holder is an object that is reached in several ways."""

    setup: str
    get: str = "{s}.n"
    put: str = "{s}.n = {v}"
    fits: tuple[str, ...] = tuple(KINDS)
    routed: bool = True


PLAIN = "class Holder:\n    def __init__(self, n):\n        self.n = n\nS = Holder({init})"
PLACES = {
    "module attribute": Place("m.n = {init}", "m.n", "m.n = {v}", routed=False),
    "object": Place(PLAIN),
    "object in an object": Place(f"{PLAIN}\nS = Holder(S)", "{s}.n.n", "{s}.n.n = {v}"),
    "setattr": Place(PLAIN, 'getattr({s}, "n")', 'setattr({s}, "n", {v})'),
    "vars": Place(PLAIN, 'vars({s})["n"]', 'vars({s})["n"] = {v}'),
    "slots": Place("class Holder:\n    __slots__ = ('n',)\nS = Holder()\nS.n = {init}"),
    "slots dataclass": Place("@dataclasses.dataclass(slots=True)\nclass Holder:\n    n: object\nS = Holder({init})"),
    "dataclass": Place("@dataclasses.dataclass\nclass Holder:\n    n: object\nS = Holder({init})"),
    "argparse.Namespace": Place("S = argparse.Namespace(n={init})"),
    "SimpleNamespace": Place("S = types.SimpleNamespace(n={init})"),
    "threading.local": Place("S = threading.local()\nS.n = {init}"),
    "function": Place("def S():\n    pass\nS.n = {init}"),
    "partial": Place("S = functools.partial(print)\nS.n = {init}"),
    "enum member": Place("class Kinds(enum.Enum):\n    ONE = 1\nS = Kinds.ONE\nS.n = {init}"),
    "Python module": Place('S = types.ModuleType("audit_config")\nS.n = {init}'),
    "class": Place("class Holder:\n    n = {init}\nS = Holder()", "Holder.n", "Holder.n = {v}", routed=False),
    "type of an object": Place("class Holder:\n    n = {init}\nS = Holder()", put="type({s}).n = {v}"),
    "property": Place(
        "class Holder:\n    def __init__(self, n):\n        self._n = n\n    @property\n    def n(self):\n"
        "        return self._n\n    @n.setter\n    def n(self, n):\n        self._n = n\nS = Holder({init})"
    ),
    "method": Place(f"{PLAIN}\n    def put(self, n):\n        self.n = n".replace("\nS = Holder({init})", "")
                    + "\nS = Holder({init})", put="{s}.put({v})"),
    "redirected": Place(
        "class Holder:\n    def __init__(self):\n        object.__setattr__(self, 'data', {{}})\n"
        "    def __setattr__(self, name, n):\n        self.data[name] = n\n    def __getattr__(self, name):\n"
        "        return self.data[name]\nS = Holder()\nS.n = {init}"
    ),
    "redirected to slots": Place(
        "class Inner:\n    __slots__ = ('n',)\nclass Holder:\n    def __init__(self):\n"
        "        object.__setattr__(self, 'inner', Inner())\n    def __setattr__(self, name, n):\n"
        "        setattr(self.inner, name, n)\n    def __getattr__(self, name):\n"
        "        return getattr(self.inner, name)\nS = Holder()\nS.n = {init}"
    ),
    "descriptor": Place(
        "class Weak:\n    def __init__(self):\n        self.data = weakref.WeakKeyDictionary()\n"
        "    def __get__(self, owner, kind=None):\n        return self.data[owner]\n    def __set__(self, owner, n):\n"
        "        self.data[owner] = n\nclass Holder:\n    n = Weak()\nS = Holder()\nS.n = {init}"
    ),
    "installed": Place("S = audit_installed.Box({init})"),
    "method of installed": Place("S = audit_installed.Box({init})", put="{s}.put({v})"),
    "installed in an object": Place(f"{PLAIN}\nS = Holder(audit_installed.Box(S.n))", "{s}.n.n", "{s}.n.n = {v}"),
    "slots in a list": Place("class Holder:\n    __slots__ = ('n',)\nS = [Holder()]\nS[0].n = {init}", "{s}[0].n",
                             "{s}[0].n = {v}"),
    "dict": Place('S = {{"n": {init}}}', '{s}["n"]', '{s}["n"] = {v}'),
    "dict in a dict": Place('S = {{"a": {{"n": {init}}}}}', '{s}["a"]["n"]', '{s}["a"]["n"] = {v}'),
    "list": Place("S = [{init}]", "{s}[0]", "{s}[0] = {v}"),
    "long list": Place("S = [0] * 120 + [{init}]", "{s}[120]", "{s}[120] = {v}"),
    "long dict": Place("S = dict.fromkeys(range(120), 0)\nS[120] = {init}", "{s}[120]", "{s}[120] = {v}"),
    "deque": Place("S = collections.deque([{init}])", "{s}[0]", "{s}[0] = {v}"),
    "OrderedDict": Place("S = collections.OrderedDict(n={init})", '{s}["n"]', '{s}["n"] = {v}'),
    "defaultdict": Place("S = collections.defaultdict(int, n={init})", '{s}["n"]', '{s}["n"] = {v}'),
    "dict of a subclass": Place("class Holder(dict):\n    pass\nS = Holder(n={init})", '{s}["n"]', '{s}["n"] = {v}'),
    "attribute of a dict": Place("class Holder(dict):\n    pass\nS = Holder()\nS.n = {init}"),
    "attribute of a list": Place("class Holder(list):\n    pass\nS = Holder()\nS.n = {init}"),
    "UserDict": Place("S = collections.UserDict(n={init})", '{s}["n"]', '{s}["n"] = {v}'),
    "ChainMap": Place("S = collections.ChainMap({{}}, dict(n={init}))", '{s}["n"]', '{s}["n"] = {v}'),
    "weak dict": Place(
        "class Key:\n    pass\nKEY = Key()\nS = weakref.WeakKeyDictionary()\nS[KEY] = {init}", "{s}[KEY]",
        "{s}[KEY] = {v}",
    ),
    "queue": Place("S = queue.Queue()\nS.put({init})", "{s}.queue[0]", "{s}.put({v}); {s}.get()"),
    "Event": Place("S = threading.Event()", "{s}.is_set()", "{s}.set() if {v} else {s}.clear()",
                   ("once", "late", "late by rate")),
    "StringIO": Place('S = io.StringIO("{init}")', "int({s}.getvalue())", '{s}.seek(0); {s}.write(str({v}))',
                      ("count", "flip", "shape")),
    "ctypes": Place("S = ctypes.c_double({init})", "{s}.value", "{s}.value = {v}", NUMBERS),
    "shared value": Place('S = multiprocessing.Value("d", {init})', "{s}.value", "{s}.value = {v}", NUMBERS),
    "numpy": Place("S = numpy.array([0, {init}], float)", "float({s}[1])", "{s}[1] = {v}", NUMBERS),
    "numpy objects": Place("S = numpy.array([0, None], object)\nS[1] = {init}", "{s}[1]", "{s}[1] = {v}",
                           (*NUMBERS, "text")),
    "array": Place('S = array.array("d", [{init}])', "{s}[0]", "{s}[0] = {v}", NUMBERS),
    "bytearray": Place("S = bytearray([{init}])", "{s}[0]", "{s}[0] = {v}", INTS),
    "memoryview": Place("S = memoryview(bytearray([{init}]))", "{s}[0]", "{s}[0] = {v}", INTS),
    "context variable": Place('S = contextvars.ContextVar("audit")\nS.set({init})', "{s}.get()", "{s}.set({v})"),
    "os.environ": Place('os.environ["AUDIT_N"] = str(int({init}))', 'int(os.environ["AUDIT_N"])',
                        'os.environ["AUDIT_N"] = str(int({v}))', INTS, routed=False),
    "global": Place("N = {init}", "N", "N = {v}", routed=False),
    "globals()": Place("N = {init}", 'globals()["N"]', 'globals()["N"] = {v}', routed=False),
    "new global": Place("", 'globals().get("N", {init})', "N = {v}",
                        ("count", "decay", "flip", "once", "shape", "rate", "item", "late", "tensor", "text"),
                        routed=False),
    "closure": Place("", "n", "n = {v}", routed=False),
    "optimizer group": Place('opt.param_groups[0]["n"] = {init}', 'opt.param_groups[0]["n"]',
                             'opt.param_groups[0]["n"] = {v}', routed=False),
    "optimizer attribute": Place("opt.n = {init}", "opt.n", "opt.n = {v}", routed=False),
    "optimizer state": Place('opt.state[m.a.weight]["n"] = {init}', 'opt.state[m.a.weight]["n"]',
                             'opt.state[m.a.weight]["n"] = {v}', routed=False),
    "attribute of a parameter": Place("m.a.weight.n = {init}", "m.a.weight.n", "m.a.weight.n = {v}", routed=False),
    "attribute of a submodule": Place("m.a.n = {init}", "m.a.n", "m.a.n = {v}", routed=False),
    "buffer": Place('m.register_buffer("n", torch.tensor({init}))', "m.n", "m.n.fill_({v})",
                    ("count", "decay", "flip", "once", "shape", "rate", "late"), routed=False),
    "read buffer": Place('m.register_buffer("n", torch.tensor({init}))', "m.n.item()", "m.n.fill_({v})",
                         ("count", "decay", "flip", "once", "shape", "rate"), routed=False),
    "lru_cache": Place(
        "@functools.lru_cache(None)\ndef holder():\n    return [{init}]", "holder()[0]", "holder()[0] = {v}",
        routed=False,
    ),
    "class of an object": Place(
        "class One:\n    n = {init}\nclass Two:\n    n = {init}\nS = One()",
        "int(type({s}) is Two)", "{s}.__class__ = Two if {v} else One", ("flip", "once", "late", "late by rate"),
    ),
    "function's default": Place("def holder(n={init}):\n    return n", "holder()", "holder.__defaults__ = ({v},)",
                                routed=False),
    "metaclass": Place("class Meta(type):\n    n = {init}\nclass Holder(metaclass=Meta):\n    pass",
                       "Holder.n", "Meta.n = {v}", routed=False),
}  # fmt: skip

ROUTES = {
    "global": "S",
    "argument": "s",
    "default": "s",
    "closure": "s",
    "model": "m.s",
    "submodule": "m.a.s",
    "optimizer": "opt.s",
    "dict": 'TABLE["s"]',
    "long list": "MANY[150]",
    "object": "T.s",
    "object in an object": "T.inner.s",
    "slot": "U.s",
    "function": "train.s",
    "class": "Trainer.shared",
    "bound": "self.s",
}
"""How the step names the holder."""

ROUTED_BY = {
    "model": "m.s = S",
    "submodule": "m.a.s = S",
    "optimizer": "opt.s = S",
    "dict": 'TABLE = {"s": S}',
    "long list": "MANY = [0] * 150 + [S]",
    "object": "T = Plain(1)\nT.s = S",
    "object in an object": "T = Plain(1)\nT.inner = Plain(2)\nT.inner.s = S",
    "slot": "class Outer:\n    __slots__ = ('s',)\nU = Outer()\nU.s = S",
    "function": "def train():\n    pass\ntrain.s = S",
    "class": "class Trainer:\n    shared = S",
}
"""What is done at the top for that."""

DECLARED = {"global": "global N", "new global": "global N", "closure": "nonlocal n"}
"""What a function says that sets the value of a place."""

WHO = "step", "helper", "callback", "hook", "caller"
WHEN = {"every": "", "second": "if i % 2 == 0:", "first": "if i == 0:", "third": "if i >= 2:"}
ORDER = "use, set", "set, use", "use, set, use"
