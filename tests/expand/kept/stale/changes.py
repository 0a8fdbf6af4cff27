"""Single changes between two runs, or between two calls, of one step: a table.

    of_value("a global", "SCALE = 2.0", "SCALE", "SCALE = 3.0")

A row has the user's file, and what is done in its variables after it was imported, and `ARGS`, the arguments, were made:
`then` in the run that fills the cache folder, and `now` in the one that uses it. `edit` rewrites the file in between.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

HEAD = """\
import abc, array, argparse, collections, configparser, contextvars, ctypes, dataclasses, decimal, enum, fractions
import functools, itertools, math, multiprocessing, operator, os, pathlib, queue, re, sys, threading, types, weakref
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.p = nn.Linear(4, 4), nn.Linear(4, 4), 0.5

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.p


def make():
    torch.manual_seed(0)
    return Net(), torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


"""

TRAIN = """
def make():
    torch.manual_seed(0)
    model = Net()
    return model, optim.SGD(model.parameters(), lr=0.5, momentum=0.9), torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""

SEQUENCE = """
def make():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    return nn.Sequential(*layers), torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


def step(model, x):
    return model(x)
"""


@dataclass(frozen=True)
class Change:
    """name: of the row. group: of its kind. source: the user's file. then, now: what is done in its variables. edit:
    what the file has in the second run in the place of something. is_kept: whether a run without the change takes its
    program from the folder, and not one that cannot be kept, or that is refused. between_calls: whether it can be done
    between two calls. rel_tol: how near numbers are."""

    name: str
    group: str
    source: str
    now: str
    then: str = ""
    edit: tuple[str, str] | None = None
    is_kept: bool = True
    between_calls: bool = True
    rel_tol: float = 1e-4

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def of_source(name, group, source, now="", **options) -> Change:
    return Change(name, group, HEAD + textwrap.dedent(source), now, **options)


def of_value(name, setup, expression, now, group="values", **options) -> Change:
    """A value that scales what the step returns."""
    step = f"\n\ndef step(model, x):\n    return model(x) * ({expression})\n"
    return of_source(name, group, textwrap.dedent(setup) + step, now, **options)


def of_file(name, setup, expression, old, new, **options) -> Change:
    """A change of the file itself."""
    return of_value(name, setup, expression, "", group="files of code", edit=(old, new), between_calls=False, **options)


BOX = "class Box:\n    def __init__(self, n):\n        self.n = n\n"

VALUES = [
    of_value("global float", "S = 2.0", "S", "S = 3.0"),
    of_value("global int", "S = 2", "S", "S = 3"),
    of_value("global bool", "S = True", "2 if S else 3", "S = False"),
    of_value("global text", "S = 'a'", "2 if S == 'a' else 3", "S = 'b'"),
    of_value("global bytes", "S = b'a'", "S[0]", "S = b'b'"),
    of_value("global complex", "S = 2j", "S.imag", "S = 3j"),
    of_value("global None", "S = None", "2 if S is None else 3", "S = 1"),
    of_value("int in place of a float", "S = 2.0", "2 if isinstance(S, float) else 3", "S = 2"),
    of_value("bool in place of an int", "S = 1", "2 if S is True else 3", "S = True"),
    of_value("negative zero", "S = 0.0", "math.copysign(2, S)", "S = -0.0"),
    of_value("dtype", "S = torch.float32", "torch.ones((), dtype=S) / 3", "S = torch.float64"),
    of_value("range", "S = range(2)", "len(S)", "S = range(3)"),
    of_value("slice", "S = slice(0, 2)", "x[S].sum()", "S = slice(0, 3)"),
    of_value("fraction", "S = fractions.Fraction(1, 2)", "float(S)", "S = fractions.Fraction(1, 3)"),
    of_value("decimal", "S = decimal.Decimal('0.5')", "float(S)", "S = decimal.Decimal('0.25')"),
    of_value("path", "S = pathlib.Path('a')", "2 if S.name == 'a' else 3", "S = pathlib.Path('b')"),
    of_value("pattern", "S = re.compile('a')", "2 if S.match('a') else 3", "S = re.compile('b')"),
    of_value("enum", "class E(enum.Enum):\n    A, B = 2, 3\nS = E.A", "S.value", "S = E.B"),
    of_value("flag enum", "class E(enum.IntFlag):\n    A, B = 2, 4\nS = E.A", "int(S)", "S = E.A | E.B"),
    of_value("list", "S = [1.0, 2.0]", "S[1]", "S = [1.0, 3.0]"),
    of_value("list in place", "S = [1.0, 2.0]", "S[1]", "S[1] = 3.0"),
    of_value("dict", "S = {'a': 2.0}", "S['a']", "S['a'] = 3.0"),
    of_value("order of a dict", "S = {'a': 2.0, 'b': 3.0}", "next(iter(S.values()))", "S['a'] = S.pop('a')"),
    of_value("tuple", "S = (1.0, 2.0)", "S[1]", "S = (1.0, 3.0)"),
    of_value("set", "S = {1, 2}", "sum(S)", "S.add(3)"),
    of_value("frozenset", "S = frozenset({1, 2})", "sum(S)", "S = frozenset({1, 3})"),
    of_value("deque", "S = collections.deque([1, 2])", "sum(S)", "S.append(3)"),
    of_value("long deque", "S = collections.deque([1.0] * 200)", "sum(S) / 200", "S[5] = 300.0"),
    of_value("defaultdict", "S = collections.defaultdict(float, a=2.0)", "S['a']", "S['a'] = 3.0"),
    of_value("factory of a defaultdict", "S = collections.defaultdict(lambda: 2.0)", "S.default_factory()",
             "S = collections.defaultdict(lambda: 3.0)"),
    of_value("Counter", "S = collections.Counter('aab')", "S['a']", "S['a'] = 5"),
    of_value("OrderedDict", "S = collections.OrderedDict(a=2.0)", "S['a']", "S['a'] = 3.0"),
    of_value("namedtuple", "P = collections.namedtuple('P', 'n')\nS = P(2.0)", "S.n", "S = P(3.0)"),
    of_value("long list", "S = [2.0] * 200", "S[150]", "S[150] = 3.0"),
    of_value("long list of lists", "S = [[2.0]] * 200", "S[150][0]", "S[150] = [3.0]"),
    of_value("long dict", "S = {i: 2.0 for i in range(200)}", "S[150]", "S[150] = 3.0"),
    of_value("long dict of functions", "S = {i: (lambda: 2.0) for i in range(200)}", "S[150]()",
             "S[150] = lambda: 3.0"),
    of_value("long list of objects", BOX + "S = [Box(2.0) for _ in range(200)]", "S[150].n", "S[150].n = 3.0"),
    of_value("nested containers", "S = {'a': [({'b': 2.0},)]}", "S['a'][0][0]['b']", "S['a'][0][0]['b'] = 3.0"),
    of_value("deeply nested lists", "S = [[[[[[[[[[2.0]]]]]]]]]]", "S[0][0][0][0][0][0][0][0][0][0]",
             "S[0][0][0][0][0][0][0][0][0][0] = 3.0"),
    of_value("dict of functions", "S = {'a': lambda: 2.0}", "S['a']()", "S['a'] = lambda: 3.0"),
    of_value("numpy array", "S = np.array([2.0])", "float(S[0])", "S[0] = 3.0"),
    of_value("large numpy array", "S = np.full(500, 2.0)", "float(S[400])", "S[400] = 3.0"),
    of_value("numpy array of objects", "S = np.array([2.0, 'a'], object)", "S[0]", "S[0] = 3.0"),
    of_value("numpy scalar", "S = np.float32(2)", "float(S)", "S = np.float32(3)"),
    of_value("bytearray", "S = bytearray(b'a')", "S[0]", "S[0] = 98"),
    of_value("memoryview", "B = bytearray(b'a')\nS = memoryview(B)", "S[0]", "B[0] = 98"),
    of_value("array", "S = array.array('d', [2.0])", "S[0]", "S[0] = 3.0"),
    of_value("context variable", "S = contextvars.ContextVar('S', default=2.0)", "S.get()", "S.set(3.0)"),
    of_value("UserDict", "S = collections.UserDict(a=2.0)", "S['a']", "S['a'] = 3.0", is_kept=False),
    of_value("UserList", "S = collections.UserList([2.0])", "S[0]", "S[0] = 3.0", is_kept=False),
    of_value("ChainMap", "S = collections.ChainMap({'a': 2.0})", "S['a']", "S['a'] = 3.0", is_kept=False),
    of_value("MappingProxyType", "D = {'a': 2.0}\nS = types.MappingProxyType(D)", "S['a']", "D['a'] = 3.0"),
    of_value("ConfigParser", "S = configparser.ConfigParser()\nS.read_dict({'a': {'n': '2'}})",
             "S.getfloat('a', 'n')", "S['a']['n'] = '3'", is_kept=False),
    of_value("weak dict", BOX + "K = Box(2.0)\nS = weakref.WeakValueDictionary(a=K)", "S['a'].n", "K.n = 3.0",
             is_kept=False),
    of_value("weak key dict", BOX + "K = Box(1)\nS = weakref.WeakKeyDictionary({K: 2.0})", "sum(S.values())",
             "S[K] = 3.0", is_kept=False),
    of_value("weak reference", BOX + "K = Box(2.0)\nS = weakref.ref(K)", "S().n", "K.n = 3.0", is_kept=False),
    of_value("weak set", BOX + "K = Box(2.0)\nS = weakref.WeakSet([K])", "len(S) + 1", "L = Box(2)\nS.add(L)",
             is_kept=False),
    of_value("ctypes number", "S = ctypes.c_double(2.0)", "S.value", "S.value = 3.0", is_kept=False),
    of_value("ctypes structure", "class C(ctypes.Structure):\n    _fields_ = [('n', ctypes.c_double)]\nS = C(2.0)",
             "S.n", "S.n = 3.0", is_kept=False),
    of_value("ctypes array", "S = (ctypes.c_double * 2)(2.0, 2.0)", "S[0]", "S[0] = 3.0", is_kept=False),
    of_value("shared value", "S = multiprocessing.Value('d', 2.0)", "S.value", "S.value = 3.0", is_kept=False),
    of_value("raw shared value", "import multiprocessing.sharedctypes\nS = multiprocessing.sharedctypes.RawValue('d', 2.0)",
             "S.value", "S.value = 3.0", is_kept=False),
    of_value("event", "S = threading.Event()", "2 if S.is_set() else 3", "S.set()", is_kept=False),
    of_value("queue", "S = queue.Queue()\nS.put(2.0)", "S.queue[0]", "S.queue[0] = 3.0", is_kept=False),
    of_value("thread local", "S = threading.local()\nS.n = 2.0", "S.n", "S.n = 3.0", is_kept=False),
    of_value("namespace", "S = types.SimpleNamespace(n=2.0)", "S.n", "S.n = 3.0"),
    of_value("argparse namespace", "S = argparse.Namespace(n=2.0)", "S.n", "S.n = 3.0"),
    of_value("dict with attributes", "class D(dict):\n    pass\nS = D(a=1.0)\nS.n = 2.0", "S.n", "S.n = 3.0"),
    of_value("OrderedDict with attributes",
             "class D(collections.OrderedDict):\n    pass\nS = D(a=1.0)\nS.n = 2.0", "S.n", "S.n = 3.0"),
    of_value("list with attributes", "class L(list):\n    pass\nS = L([1.0])\nS.n = 2.0", "S.n", "S.n = 3.0"),
    of_value("float with attributes", "class N(float):\n    pass\nS = N(1.0)\nS.n = 2.0", "S.n", "S.n = 3.0"),
    of_value("text with attributes", "class T(str):\n    pass\nS = T('a')\nS.n = 2.0", "S.n", "S.n = 3.0"),
    of_value("tuple with attributes", "class T(tuple):\n    pass\nS = T((1.0,))\nS.n = 2.0", "S.n", "S.n = 3.0"),
    of_value("object", BOX + "S = Box(2.0)", "S.n", "S.n = 3.0"),
    of_value("object in an object", BOX + "S = Box(Box(2.0))", "S.n.n", "S.n.n = 3.0"),
    of_value("object in a list", BOX + "S = [Box(2.0)]", "S[0].n", "S[0].n = 3.0"),
    of_value("objects in a dict by a loop", BOX + "S = {'a': Box(2.0)}", "sum(b.n for b in S.values())",
             "S['a'].n = 3.0"),
    of_value("slots", "class B:\n    __slots__ = ('n',)\nS = B()\nS.n = 2.0", "S.n", "S.n = 3.0"),
    of_value("dataclass", "@dataclasses.dataclass\nclass B:\n    n: float\nS = B(2.0)", "S.n", "S.n = 3.0"),
    of_value("frozen slots dataclass", "@dataclasses.dataclass(frozen=True, slots=True)\nclass B:\n    n: float\nS = B(2.0)",
             "S.n", "S = B(3.0)"),
    of_value("property", BOX + "    @property\n    def twice(self):\n        return self.n * 2\nS = Box(2.0)", "S.twice",
             "S.n = 3.0"),
    of_value("item of an object", BOX + "    def __getitem__(self, i):\n        return self.n\nS = Box(2.0)", "S[0]",
             "S.n = 3.0"),
    of_value("callable object", BOX + "    def __call__(self):\n        return self.n\nS = Box(2.0)", "S()",
             "S.n = 3.0"),
    of_value("by getattr", BOX + "S = Box(2.0)", "getattr(S, 'n')", "S.n = 3.0"),
    of_value("by attrgetter", BOX + "S, get = Box(2.0), operator.attrgetter('n')", "get(S)", "S.n = 3.0"),
    of_value("by globals", "SCALE = 2.0", "globals()['SCALE']", "SCALE = 3.0"),
    of_value("by vars", BOX + "S = Box(2.0)", "vars(S)['n']", "S.n = 3.0"),
    of_value("a method of a builtin", "D = {'a': 2.0}\nget = D.get", "get('a')", "D['a'] = 3.0", is_kept=False),
    of_value("a method of a list", "L = [2.0]\nat = L.__getitem__", "at(0)", "L[0] = 3.0", is_kept=False),
    of_value("a method of a text", "at = 'a'.__eq__", "2 if at('a') else 3", "at = 'b'.__eq__", is_kept=False),
    of_value("methodcaller", "S, get = {'a': 2.0, 'b': 3.0}, operator.methodcaller('get', 'a')", "get(S)",
             "get = operator.methodcaller('get', 'b')", is_kept=False),
    of_value("itemgetter", "S, get = {'a': 2.0, 'b': 3.0}, operator.itemgetter('a')", "get(S)",
             "get = operator.itemgetter('b')", is_kept=False),
    of_value("attrgetter", "S, get = types.SimpleNamespace(a=2.0, b=3.0), operator.attrgetter('a')", "get(S)",
             "get = operator.attrgetter('b')", is_kept=False),
    of_value("partial", "def f(a, b):\n    return a * b\nS = functools.partial(f, 2.0)", "S(1.0)",
             "S = functools.partial(f, 3.0)"),
    of_value("partial by keyword", "def f(a, b):\n    return a * b\nS = functools.partial(f, b=2.0)", "S(1.0)",
             "S = functools.partial(f, b=3.0)"),
    of_value("partial of a builtin", "S = functools.partial(max, 2.0)", "S(1.0)", "S = functools.partial(max, 3.0)"),
    of_value("partial of an object's method", BOX + "    def get(self, i):\n        return self.n\n"
             "S = functools.partial(Box(2.0).get, 0)", "S()", "S = functools.partial(Box(3.0).get, 0)"),
    of_value("iterator of a count", "S = itertools.count(2)", "next(S)", "S = itertools.count(3)",
             is_kept=False),
]  # fmt: skip

CODE = [
    of_file("edited step", "", "2.0", "2.0", "3.0"),
    of_file("edited constant", "S = 2.0", "S", "S = 2.0", "S = 3.0"),
    of_file("edited helper", "def f():\n    return 2.0", "f()", "return 2.0", "return 3.0"),
    of_file("edited module", "", "1.0", "torch.tanh", "torch.sin"),
    of_file("edited class attribute", "class B:\n    n = 2.0", "B.n", "n = 2.0", "n = 3.0"),
    of_file("edited default", "def f(n=2.0):\n    return n", "f()", "n=2.0", "n=3.0"),
    of_file("edited decorator", "def twice(fn):\n    return lambda: fn() * 2\n@twice\ndef f():\n    return 1.0", "f()",
            "fn() * 2", "fn() * 3"),
    of_file("edited set", "def f(a):\n    return 2.0 if a in {'a', 'b'} else 3.0", "f('b')", "'a', 'b'", "'a', 'c'"),
    of_file("edited inner function", "def f():\n    def g():\n        return 2.0\n    return g()", "f()", "2.0", "3.0"),
    of_file("edited comprehension", "def f():\n    return sum(2.0 for _ in range(2))", "f()", "2.0", "3.0"),
    of_value("other function", "def f():\n    return 2.0\ndef g():\n    return 3.0\nS = f", "S()", "S = g", group="code"),
    of_value("function put in its place", "def f():\n    return 2.0", "f()", "def f():\n    return 3.0", group="code"),
    of_value("other code of a function", "def f():\n    return 2.0", "f()", "f.__code__ = (lambda: 3.0).__code__",
             group="code"),
    of_value("default", "def f(n=2.0):\n    return n", "f()", "f.__defaults__ = (3.0,)", group="code"),
    of_value("keyword default", "def f(*, n=2.0):\n    return n", "f()", "f.__kwdefaults__ = {'n': 3.0}", group="code"),
    of_value("mutable default", "def f(n=[2.0]):\n    return n[0]", "f()", "f.__defaults__[0][0] = 3.0", group="code"),
    of_value("attribute of a function", "def f():\n    return f.n\nf.n = 2.0", "f()", "f.n = 3.0", group="code"),
    of_value("closure", "def around(n):\n    def f():\n        return n\n    return f\nf = around(2.0)", "f()",
             "f = around(3.0)", group="code"),
    of_value("cell", "def around(n):\n    def f():\n        return n\n    return f\nf = around(2.0)", "f()",
             "f.__closure__[0].cell_contents = 3.0", group="code"),
    of_value("list in a closure", "def around(n):\n    def f():\n        return n[0]\n    return f\nL = [2.0]\nf = around(L)",
             "f()", "L[0] = 3.0", group="code"),
    of_value("wrapped function", "def twice(fn):\n    @functools.wraps(fn)\n    def run():\n        return fn() * N\n"
             "    return run\nN = 2.0\n@twice\ndef f():\n    return 1.0", "f()", "N = 3.0", group="code"),
    of_value("cached function", "N = 2.0\n@functools.lru_cache\ndef f():\n    return N", "f()", "N = 3.0\nf.cache_clear()",
             group="code"),
    of_value("function made by exec", "there = {}\nexec('def f():\\n    return 2.0', there)\nf = there['f']", "f()",
             "exec('def f():\\n    return 3.0', there)\nf = there['f']", group="code"),
    of_value("global of a function made by exec", "there = {'N': 2.0}\nexec('def f():\\n    return N', there)\n"
             "f = there['f']", "f()", "there['N'] = 3.0", group="code"),
    of_value("lambda by eval", "f = eval('lambda: 2.0', {})", "f()", "f = eval('lambda: 3.0', {})", group="code"),
    of_value("code by eval in the step", "N = 2.0", "eval('N')", "N = 3.0", group="code", is_kept=False),
    of_value("a builtin's name", "", "abs(-2.0)", "abs = lambda n: 3.0", group="code"),
    of_value("a replaced builtin", "import builtins\nREAL = abs", "abs(-2.0)",
             "builtins.abs = lambda n: 3.0 if n == -2.0 else REAL(n)", group="code"),
    of_value("a new builtin", "import builtins\nbuiltins.of_stale = 2.0", "of_stale", "builtins.of_stale = 3.0",
             group="code"),
    of_value("method of a class", BOX + "    def get(self):\n        return self.n\nS = Box(2.0)", "S.get()",
             "Box.get = lambda self: 3.0", group="code"),
    of_value("method of an object", BOX + "    def get(self):\n        return self.n\nS = Box(2.0)", "S.get()",
             "S.get = lambda: 3.0", group="code"),
    of_value("static method", "class B:\n    @staticmethod\n    def get():\n        return 2.0", "B.get()",
             "B.get = staticmethod(lambda: 3.0)", group="code"),
    of_value("class method", "class B:\n    n = 2.0\n    @classmethod\n    def get(cls):\n        return cls.n", "B.get()",
             "B.n = 3.0", group="code"),
    of_value("attribute of a class", "class B:\n    n = 2.0", "B.n", "B.n = 3.0", group="code"),
    of_value("list in a class", "class B:\n    n = [2.0]", "B.n[0]", "B.n[0] = 3.0", group="code"),
    of_value("attribute of a base class", "class A:\n    n = 2.0\nclass B(A):\n    pass\nS = B()", "S.n", "A.n = 3.0",
             group="code"),
    of_value("attribute of a subclass", "class A:\n    n = 2.0\nclass B(A):\n    pass\nS = B()", "S.n", "B.n = 3.0",
             group="code"),
    of_value("other class of an object", "class A:\n    n = 2.0\nclass B:\n    n = 3.0\nS = A()", "S.n",
             "S.__class__ = B", group="code"),
    of_value("attribute of a metaclass", "class M(type):\n    n = 2.0\nclass B(metaclass=M):\n    pass", "B.n",
             "M.n = 3.0", group="code"),
    of_value("bases of a class", "class A:\n    n = 2.0\nclass C:\n    n = 3.0\nclass B(A):\n    pass", "B.n",
             "B.__bases__ = (C,)", group="code"),
    of_value("descriptor", "class D:\n    n = 2.0\n    def __get__(self, *_):\n        return self.n\nclass B:\n    at = D()\n"
             "S = B()", "S.at", "D.n = 3.0", group="code"),
    of_value("getattr of a class", "class B:\n    def __getattr__(self, name):\n        return N\nN = 2.0\nS = B()", "S.any",
             "N = 3.0", group="code"),
    of_value("getattr of a module", "sys.modules[__name__].n = 2.0\nME = sys.modules[__name__]", "ME.n", "ME.n = 3.0",
             group="code"),
    of_value("variable of a frame", "N = 2.0\ndef f():\n    return sys._getframe().f_globals['N']", "f()", "N = 3.0",
             group="code", is_kept=False),
    of_value("variable of the frame of the caller", "M = 2.0\ndef f():\n    return sys._getframe(1).f_globals['M']", "f()",
             "M = 3.0", group="code", is_kept=False),
]  # fmt: skip

OF_JIT = """
def two(x):
    return x * 2.0

def three(x):
    return x * 3.0

def step(model, x):
    return f(model(x))

"""

OF_OPS = """
{make}
def step(model, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(scaled(x).sum(), x)[0] + scaled(x).detach()
"""

CUSTOM_OP = """
N = 2.0

@torch.library.custom_op(f"stale::of_{{__name__}}", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@scaled.register_fake
def _(x):
    return torch.empty_like(x)

def backward(ctx, grad):
    return grad * N

scaled.register_autograd(backward)
"""

COMPOSITE = """
N = 2.0
library = torch.library.Library(f"stale_{{__name__}}", "FRAGMENT")
library.define("scaled(Tensor x) -> Tensor")

def f(x):
    return x * N

library.impl("scaled", f, "CompositeImplicitAutograd")
scaled = getattr(torch.ops, f"stale_{{__name__}}").scaled
"""

FUNCTION = """
N = 2.0

class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * N

scaled = Scaled.apply
"""

OPS = [
    of_source("scripted function", "torch's functions", OF_JIT + "f = torch.jit.script(two)", "f = torch.jit.script(three)",
              is_kept=False),
    of_source("traced function", "torch's functions", OF_JIT + "f = torch.jit.trace(two, torch.ones(4, 4))",
              "f = torch.jit.trace(three, torch.ones(4, 4))", is_kept=False),
    of_source("scripted module", "torch's functions", """
        class Two(nn.Module):
            n: float
            def __init__(self, n):
                super().__init__()
                self.n = n
            def forward(self, x):
                return x * self.n
        f = torch.jit.script(Two(2.0))
        def step(model, x):
            return f(model(x))
        """, "f = torch.jit.script(Two(3.0))", is_kept=False),
    of_source("formula of a gradient of a custom op", "torch's functions",
              OF_OPS.format(make=CUSTOM_OP.format()), "N = 3.0", is_kept=False),
    of_source("composite op of a library", "torch's functions", OF_OPS.format(make=COMPOSITE.format()), "N = 3.0",
              is_kept=False),
    of_source("backward of a function", "torch's functions", OF_OPS.format(make=FUNCTION), "N = 3.0"),
    of_source("forward of a function", "torch's functions", OF_OPS.format(make=FUNCTION),
              "Scaled.forward = staticmethod(lambda ctx, x: x * 3)"),
    of_value("vmapped function", "N = 2.0\ndef f(row):\n    return row * N", "torch.vmap(f)(x).sum()", "N = 3.0",
             group="torch's functions"),
    of_value("checkpointed function", "from torch.utils.checkpoint import checkpoint\nN = 2.0\ndef f(x):\n    return x * N",
             "checkpoint(f, x, use_reentrant=False).sum()", "N = 3.0", group="torch's functions", is_kept=False),
    of_source("replaced method of tensors", "torch's functions", """
        REAL = torch.Tensor.square
        def step(model, x):
            return model(x).square()
        """, "torch.Tensor.square = lambda x: REAL(x) * 3"),
    of_source("replaced functional", "torch's functions", """
        REAL = F.gelu
        def step(model, x):
            return F.gelu(model(x))
        """, "F.gelu = lambda x: REAL(x) * 3"),
    of_source("replaced function of torch", "torch's functions", """
        REAL = torch.tanh
        def step(model, x):
            return torch.tanh(x) * model(x)
        """, "torch.tanh = lambda x: REAL(x) * 3"),
    of_source("replaced forward of a class of torch", "torch's functions", """
        REAL = nn.Linear.forward
        def step(model, x):
            return model(x)
        """, "nn.Linear.forward = lambda self, x: REAL(self, x) * 3"),
    of_source("value of a replaced method", "torch's functions", """
        REAL, N = torch.Tensor.square, 2.0
        torch.Tensor.square = lambda x: REAL(x) * N
        def step(model, x):
            return model(x).square()
        """, "N = 3.0"),
    of_source("replaced step of an optimiser", "torch's functions", TRAIN,
              "R = optim.SGD.step\noptim.SGD.step = lambda self, closure=None: (R(self), R(self)) and None"),
    of_source("mode of functions", "torch's functions", """
        class Mode(torch.overrides.TorchFunctionMode):
            n = 1.0
            def __torch_function__(self, function, types, args=(), kwargs=None):
                out = function(*args, **(kwargs or {}))
                return out * N if function is torch.tanh else out
        N = 2.0
        def step(model, x):
            with Mode():
                return model(x)
        """, "N = 3.0"),
]  # fmt: skip


def of_model(name, layers, now, group="models", setup="", **options) -> Change:
    """A change of a model, `M`, of these layers."""
    source = f"""{textwrap.dedent(setup)}

def make():
    torch.manual_seed(0)
    return nn.Sequential({layers}), torch.linspace(-1.0, 1.0, 16).reshape(4, 4)


def step(model, x):
    return model(x)
"""
    return of_source(name, group, source, f"M = ARGS[0]\n{now}", **options)


SHARDED = "HOW = {'ranks': 4, 'fully_shard': 'dp'}"
LINEAR = "nn.Linear(4, 4, bias=False)"
FOUR = ", ".join([LINEAR] * 4)
TANH = "nn.Tanh()"
BUFFERS = """
class Scale(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("n", torch.tensor(n))
    def forward(self, x):
        return x * self.n
"""
HOLDS = """
class Holds(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held
    def forward(self, x):
        return x * self.scale(self.held)
"""

MODELS = [
    of_model("another tie of weights", FOUR, "M[2].weight = M[0].weight", "ties", then="M = ARGS[0]; M[1].weight = M[0].weight"),
    of_model("another tie of weights in shards", FOUR, "M[2].weight = M[0].weight", "ties", SHARDED,
             then="M = ARGS[0]; M[1].weight = M[0].weight"),
    of_model("other places of a module in shards", f"{LINEAR}, {TANH}, {LINEAR}, {TANH}", "M[2], M[3] = M[1], M[0]", "ties", SHARDED,
             then="M = ARGS[0]; M[2], M[3] = M[0], M[1]"),
    of_model("a tie of weights", FOUR, "M[2].weight = M[0].weight", "ties"),
    of_model("a tie given up", FOUR, "M[1].weight = nn.Parameter(M[0].weight.detach().clone() * 2)", "ties",
             then="M = ARGS[0]; M[1].weight = M[0].weight", between_calls=False),
    of_model("other pairs of ties", FOUR, "M[3].weight, M[2].weight = M[0].weight, M[1].weight", "ties",
             then="M = ARGS[0]; M[2].weight, M[3].weight = M[0].weight, M[1].weight"),
    of_model("another tie of buffers", "Scale(2.0), Scale(3.0), Scale(5.0)", "M[2].n = M[0].n", "ties", BUFFERS,
             then="M = ARGS[0]; M[1].n = M[0].n"),
    of_model("other places of a module", f"{LINEAR}, {TANH}, {LINEAR}, {TANH}", "M[2], M[3] = M[1], M[0]", "ties",
             then="M = ARGS[0]; M[2], M[3] = M[0], M[1]"),
    of_model("other places of modules without parameters", "nn.Tanh(), nn.Hardtanh(-0.1, 0.5), nn.Softsign(), nn.Softsign()",
             "M[0], M[2], M[3] = nn.ReLU(), M[1], M[0]", "ties", then="M = ARGS[0]; M[2], M[3] = M[0], M[1]"),
    of_source("tie across two models", "ties", """
        def make():
            torch.manual_seed(0)
            a, b = (nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)) for _ in range(2))
            return a, b, torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
        def step(a, b, x):
            return a(x) * b(x)
        """, "ARGS[1][1].weight = ARGS[0][0].weight", then="ARGS[1][0].weight = ARGS[0][0].weight"),
    of_source("another tie that is trained", "ties", SEQUENCE + """
        def make():
            torch.manual_seed(0)
            model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(3)])
            tie(model)
            return model, optim.SGD(model.parameters(), lr=0.5), torch.linspace(-1.0, 1.0, 16).reshape(4, 4)
        def step(model, optimizer, x):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()
        def tie(model):
            model[KNOBS[0]].weight = model[0].weight
        KNOBS = [1]
        """.replace("\n        ", "\n"), "KNOBS[0] = 2; ARGS = make()", between_calls=False),
    of_model("attribute of a module", "Net()", "M[0].p = 0.25"),
    of_model("attribute of a module, another type", "Net()", "M[0].p = torch.tensor(0.25)"),
    of_model("training flag", "nn.Dropout(0.5)", "M.eval()", then="ARGS[0].eval(); ARGS[0].p = 1"),
    of_model("evaluation", "nn.BatchNorm1d(4)", "M.eval()"),
    of_model("probability of dropout", "nn.Dropout(0.0)", "M[0].p = 1.0"),
    of_model("epsilon of a norm", "nn.LayerNorm(4)", "M[0].eps = 1.0"),
    of_model("momentum of a norm", "nn.BatchNorm1d(4)", "M[0].momentum = 0.9"),
    of_model("another module", f"{LINEAR}, nn.Tanh()", "M[1] = nn.Sigmoid()"),
    of_model("a module less", f"{LINEAR}, nn.Tanh()", "del M[1]"),
    of_model("a module more", f"{LINEAR}", "M.append(nn.Tanh())"),
    of_model("order of modules", "nn.Tanh(), nn.Hardtanh(-0.5, 0.5), nn.Softsign()", "M[0], M[2] = M[2], M[0]"),
    of_model("bias", "nn.Linear(4, 4)", "M[0].bias = None"),
    of_model("slope of an activation", "nn.LeakyReLU(0.1)", "M[0].negative_slope = 0.5"),
    of_model("kind of padding", "nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 3, padding=1), nn.Flatten()",
             "M[1].padding_mode = 'circular'; M[1]._reversed_padding_repeated_twice = [1, 1]"),
    of_model("stride of a convolution", "nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 1, 2, stride=1), nn.Flatten()",
             "M[1].stride = (2,)"),
    of_model("frozen parameter", "nn.Linear(4, 4)", "M[0].weight.requires_grad_(False)"),
    of_model("attribute of a parameter", "Reads()", "M[0].w.n = 3.0", setup="""
        class Reads(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.ones(4))
                self.w.n = 2.0
            def forward(self, x):
                return x * self.w * self.w.n
        """),
    of_model("class of a module", "nn.Tanh()", "M[0].__class__ = nn.Sigmoid"),
    of_model("forward of a module", "nn.Tanh()", "M[0].forward = torch.sin"),
    of_model("attribute of a class of modules", "Scaled()", "Scaled.n = 3.0", setup="""
        class Scaled(nn.Module):
            n = 2.0
            def forward(self, x):
                return x * self.n
        """),
    of_model("hook before", "nn.Tanh()", "M[0].register_forward_pre_hook(lambda m, a: (a[0] * 3,))"),
    of_model("hook behind", "nn.Tanh()", "M[0].register_forward_hook(lambda m, a, y: y * 3)"),
    of_model("value of a hook", "nn.Tanh()", "N = 3.0", then="N = 2.0", setup="""
        N = 2.0
        REAL = nn.Tanh
        class Tanh(nn.Tanh):
            def __init__(self):
                super().__init__()
                self.register_forward_hook(lambda m, a, y: y * N)
        nn_ = nn
        class nn(types.SimpleNamespace):
            Sequential, Module, Tanh = nn_.Sequential, nn_.Module, Tanh
        """),
    of_model("order of hooks", "nn.Tanh()", "hooks(M, add, times)", then="hooks(ARGS[0], times, add)", setup="""
        def times(m, a, y):
            return y * 3
        def add(m, a, y):
            return y + 1
        def hooks(model, *several):
            for hook in several:
                model[0].register_forward_hook(hook)
        """, between_calls=False),
    of_model("hook on all modules", "nn.Tanh()", "H = nn.modules.module.register_module_forward_hook(lambda m, a, y: y * 3)"),
    of_model("parametrization", "nn.Linear(4, 4)",
             "import torch.nn.utils.parametrize as P; P.register_parametrization(M[0], 'weight', nn.Tanh())",
             between_calls=False),
    of_model("list of numbers in a module", "Holds([1.0, 2.0])", "M[0].held[1] = 3.0",
             setup=HOLDS + "    def scale(self, held):\n        return held[1]"),
    of_model("dict with attributes in a module", "Holds(D())", "M[0].held.n = 3.0",
             setup="class D(dict):\n    n = 2.0\n" + HOLDS + "    def scale(self, held):\n        return held.n"),
    of_model("own attribute of a dict in a module", "Holds(D())", "M[0].held.n = 3.0", then="ARGS[0][0].held.n = 2.0",
             setup="class D(collections.OrderedDict):\n    pass\n" + HOLDS + "    def scale(self, held):\n        return held.n"),
    of_model("object in a module", "Holds(types.SimpleNamespace(n=2.0))", "M[0].held.n = 3.0",
             setup=HOLDS + "    def scale(self, held):\n        return held.n"),
    of_model("UserDict in a module", "Holds(collections.UserDict(n=2.0))", "M[0].held['n'] = 3.0",
             setup=HOLDS + "    def scale(self, held):\n        return held['n']", is_kept=False),
    of_model("proxy of a dict in a module", "Holds(types.MappingProxyType(D))", "D['n'] = 3.0",
             setup="D = {'n': 2.0}\n" + HOLDS + "    def scale(self, held):\n        return held['n']"),
    of_model("ConfigParser in a module", "Holds(S)", "S['a']['n'] = '3'", setup="S = configparser.ConfigParser()\n"
             "S.read_dict({'a': {'n': '2'}})\n" + HOLDS + "    def scale(self, held):\n        return held.getfloat('a', 'n')",
             is_kept=False),
    of_model("weak dict in a module", "Holds(weakref.WeakValueDictionary(a=K))", "K.n = 3.0",
             setup=BOX + "K = Box(2.0)\n" + HOLDS + "    def scale(self, held):\n        return held['a'].n", is_kept=False),
    of_model("ctypes in a module", "Holds(ctypes.c_double(2.0))", "M[0].held.value = 3.0",
             setup=HOLDS + "    def scale(self, held):\n        return held.value", is_kept=False),
    of_model("shared value in a module", "Holds(multiprocessing.Value('d', 2.0))", "M[0].held.value = 3.0",
             setup=HOLDS + "    def scale(self, held):\n        return held.value", is_kept=False),
    of_model("event in a module", "Holds(threading.Event())", "M[0].held.set()",
             setup=HOLDS + "    def scale(self, held):\n        return 2.0 if held.is_set() else 3.0", is_kept=False),
    of_model("bound method in a module", "Holds(D.get)", "D['n'] = 3.0",
             setup="D = {'n': 2.0}\n" + HOLDS + "    def scale(self, held):\n        return held('n')", is_kept=False),
    of_model("methodcaller in a module", "Holds(operator.methodcaller('get', 'a'))",
             "M[0].held = operator.methodcaller('get', 'b')",
             setup="D = {'a': 2.0, 'b': 3.0}\n" + HOLDS + "    def scale(self, held):\n        return held(D)", is_kept=False),
    of_model("itemgetter in a module", "Holds(operator.itemgetter('a'))", "M[0].held = operator.itemgetter('b')",
             setup="D = {'a': 2.0, 'b': 3.0}\n" + HOLDS + "    def scale(self, held):\n        return held(D)", is_kept=False),
    of_model("numpy array in a module", "Holds(np.array([2.0]))", "M[0].held[0] = 3.0",
             setup=HOLDS + "    def scale(self, held):\n        return float(held[0])"),
    of_model("numpy array of objects in a module", "Holds(np.array([Box(2.0)], object))", "M[0].held[0].n = 3.0",
             setup=BOX + HOLDS + "    def scale(self, held):\n        return held[0].n"),
    of_model("long dict of functions in a module", "Holds({i: (lambda: 2.0) for i in range(200)})",
             "M[0].held[150] = lambda: 3.0", setup=HOLDS + "    def scale(self, held):\n        return held[150]()"),
    of_model("long list of objects in a module", "Holds([Box(2.0) for i in range(200)])", "M[0].held[150].n = 3.0",
             setup=BOX + HOLDS + "    def scale(self, held):\n        return held[150].n"),
    of_model("slots in a module", "Holds(S)", "M[0].held.n = 3.0", setup="class B:\n    __slots__ = ('n',)\n"
             "S = B()\nS.n = 2.0\n" + HOLDS + "    def scale(self, held):\n        return held.n"),
    of_source("module in a plain list", "models", """
        class Holds(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.others = nn.Linear(4, 4), {"a": [nn.Tanh()]}
            def forward(self, x):
                return self.others["a"][0](self.up(x))
        def make():
            torch.manual_seed(0)
            return Holds(), torch.ones(4, 4)
        def step(model, x):
            return model(x)
        """, "ARGS[0].others['a'][0] = nn.Hardtanh(-0.1, 0.1)", then="ARGS[0].others['a'][0] = nn.Hardtanh(-0.2, 0.2)"),
    of_source("attribute of a module in a plain list", "models", """
        class Holds(nn.Module):
            def __init__(self):
                super().__init__()
                self.up, self.others = nn.Linear(4, 4), {"a": [nn.Hardtanh(-0.2, 0.2)]}
            def forward(self, x):
                return self.others["a"][0](self.up(x))
        def make():
            torch.manual_seed(0)
            return Holds(), torch.ones(4, 4)
        def step(model, x):
            return model(x)
        """, "ARGS[0].others['a'][0].max_val = 0.1"),
    of_value("attribute of a module in a global list", "LAYERS = [[nn.Hardtanh(-0.2, 0.2)]]", "LAYERS[0][0](x).sum()",
             "LAYERS[0][0].max_val = 0.1", group="models"),
    of_value("attribute of a module around", "LAYER = nn.Hardtanh(-0.2, 0.2)", "LAYER(x).sum()", "LAYER.max_val = 0.1",
             group="models"),
]  # fmt: skip


def of_training(name, now, then="", **options) -> Change:
    return of_source(name, "optimisers", TRAIN, f"O = ARGS[1]; G = O.param_groups[0]\n{now}",
                     then=f"O = ARGS[1]; G = O.param_groups[0]\n{then}", **options)  # fmt: skip


OPTIMISERS = [
    of_training("learning rate", "G['lr'] = 0.05"),
    of_training("momentum", "G['momentum'] = 0.5"),
    of_training("no momentum", "G['momentum'] = 0.0"),
    of_training("Nesterov", "G['nesterov'] = True"),
    of_training("weight decay", "G['weight_decay'] = 0.5"),
    of_training("maximise", "G['maximize'] = True"),
    of_training("foreach", "G['foreach'] = True"),
    of_training("dampening", "G['dampening'] = 0.5"),
    of_training("another optimiser", "ARGS = ARGS[0], optim.Adam(ARGS[0].parameters(), lr=0.5), ARGS[2]", between_calls=False),
    of_training("fewer parameters", "ARGS = ARGS[0], optim.SGD(ARGS[0].up.parameters(), lr=0.5, momentum=0.9), ARGS[2]",
                between_calls=False),
    of_training("two groups", "ARGS = ARGS[0], optim.SGD([{'params': ARGS[0].up.parameters(), 'lr': 0.1}, "
                "{'params': ARGS[0].down.parameters()}], lr=0.5, momentum=0.9), ARGS[2]", between_calls=False),
    of_training("order of parameters", "ARGS = ARGS[0], optim.SGD([*ARGS[0].parameters()][::-1], lr=0.5, momentum=0.9), ARGS[2]",
                between_calls=False),
    of_training("a hook before the step", "O.register_step_pre_hook(lambda *a: [p.grad.mul_(3) for p in ARGS[0].parameters()] and None)",
                is_kept=True),
    of_training("a frozen layer", "ARGS[0].up.requires_grad_(False)", between_calls=False),
    of_training("a hook on a parameter", "ARGS[0].up.weight.register_hook(lambda g: g * 3)"),
    of_training("a gradient that is there", "ARGS[0].up.weight.grad = torch.ones(4, 4)", between_calls=False),
    of_training("a step of its own", "R = O.step\nO.step = lambda: (R(), R())", between_calls=False),
    of_training("state that is there", "step(*ARGS)", between_calls=False),
]  # fmt: skip


def of_flag(name, now, use="model(x)", then="", **options) -> Change:
    return of_source(name, "flags", f"def step(model, x):\n    return {use}\n", now, then=then, **options)


FLAGS = [
    of_flag("default dtype", "torch.set_default_dtype(torch.float64)", "model(x) + torch.ones(4) / 3"),
    of_flag("no gradients", "torch.set_grad_enabled(False)", "model(x) * (2 if torch.is_grad_enabled() else 3)"),
    of_flag("precision of products", "torch.set_float32_matmul_precision('medium')",
            "model(x) * (2 if torch.get_float32_matmul_precision() == 'highest' else 3)"),
    of_flag("deterministic algorithms", "torch.use_deterministic_algorithms(True)",
            "model(x) * (2 if torch.are_deterministic_algorithms_enabled() else 3)"),
    of_flag("threads", "torch.set_num_threads(torch.get_num_threads() + 1)", "model(x) * torch.get_num_threads()",
            is_kept=False),
    of_flag("seed", "torch.manual_seed(3)", "model(x) * (torch.initial_seed() % 7)", then="torch.manual_seed(2)",
            is_kept=False),
    of_flag("autocast", "torch.set_autocast_enabled('cpu', True)", rel_tol=5e-2),
    of_flag("dtype of autocast", "torch.set_autocast_dtype('cpu', torch.float16)",
            then="torch.set_autocast_enabled('cpu', True)", rel_tol=5e-2, between_calls=False),
    of_flag("anomalies", "torch.autograd.set_detect_anomaly(True)", "model(x) * (2 if torch.is_anomaly_enabled() else 3)"),
    of_flag("cuDNN", "torch.backends.cudnn.benchmark = True", "model(x) * (2 if torch.backends.cudnn.benchmark else 3)"),
    of_flag("limit of recursion", "sys.setrecursionlimit(5000)", "model(x) * sys.getrecursionlimit()",
            then="sys.setrecursionlimit(4000)", is_kept=False),
    of_flag("arguments of the process", "sys.argv = ['a', 'b']", "model(x) * len(sys.argv)", then="sys.argv = ['a']"),
    of_flag("print options", "torch.set_printoptions(precision=3)", "model(x) * torch._tensor_str.PRINT_OPTS.precision",
            then="torch.set_printoptions(precision=5)", is_kept=False),
]  # fmt: skip


def of_world(name, expression, then, now, setup="", **options) -> Change:
    """What the process says, that the step asks."""
    return of_value(name, setup, expression, now, then=then, group="world", **{"is_kept": False, **options})


NEW = "HOME = __file__ + '_files'; os.makedirs(HOME, exist_ok=True)\n"
WRITE = "pathlib.Path(HOME, 'n').write_text('{}')"

WORLD = [
    of_world("variable of the environment", "float(os.environ['OF_STALE'])", "os.environ['OF_STALE'] = '2'",
             "os.environ['OF_STALE'] = '3'", is_kept=True),
    of_world("variable that is gone", "float(os.environ.get('OF_STALE', 3))", "os.environ['OF_STALE'] = '2'",
             "os.environ.pop('OF_STALE', None)", is_kept=True),
    of_world("by getenv", "float(os.getenv('OF_STALE'))", "os.environ['OF_STALE'] = '2'", "os.environ['OF_STALE'] = '3'",
             is_kept=True),
    of_world("a variable that is there", "2 if 'OF_STALE' in os.environ else 3", "os.environ.pop('OF_STALE', None)",
             "os.environ['OF_STALE'] = '3'", is_kept=True),
    of_world("all variables", "len([n for n in os.environ if n.startswith('OF_STALE')]) + 1",
             "os.environ.pop('OF_STALE', None)", "os.environ['OF_STALE'] = '3'"),
    of_world("a file", "float(open(os.path.join(HOME, 'n')).read())", WRITE.format(2), WRITE.format(3), NEW),
    of_world("a file by its path", "float(pathlib.Path(HOME, 'n').read_text())", WRITE.format(2), WRITE.format(3), NEW),
    of_world("a file of numpy", "float(np.load(os.path.join(HOME, 'n.npy')))",
             "np.save(os.path.join(HOME, 'n.npy'), np.float64(2))", "np.save(os.path.join(HOME, 'n.npy'), np.float64(3))", NEW),
    of_world("a file by its number", "float(os.read(os.open(os.path.join(HOME, 'n'), os.O_RDONLY), 9))", WRITE.format(2),
             WRITE.format(3), NEW),
    of_world("a file in a helper", "read()", WRITE.format(2), WRITE.format(3),
             NEW + "def read():\n    with open(os.path.join(HOME, 'n')) as file:\n        return float(file.read())"),
    of_world("a file that is there", "2 if os.path.exists(os.path.join(HOME, 'm')) else 3", "", "pathlib.Path(HOME, 'm').touch()",
             NEW + "pathlib.Path(HOME, 'm').unlink(missing_ok=True)", is_kept=True),
    of_world("whether it is a file", "2 if os.path.isfile(os.path.join(HOME, 'm')) else 3", "", "pathlib.Path(HOME, 'm').touch()",
             NEW + "pathlib.Path(HOME, 'm').unlink(missing_ok=True)", is_kept=True),
    of_world("whether it is a folder", "2 if os.path.isdir(os.path.join(HOME, 'f')) else 3", "", "pathlib.Path(HOME, 'f').mkdir(exist_ok=True)",
             NEW + "(p := pathlib.Path(HOME, 'f')).exists() and p.rmdir()", is_kept=True),
    of_world("whether a path is there", "2 if pathlib.Path(HOME, 'm').exists() else 3", "", "pathlib.Path(HOME, 'm').touch()",
             NEW + "pathlib.Path(HOME, 'm').unlink(missing_ok=True)"),
    of_world("size of a file", "os.path.getsize(os.path.join(HOME, 'n'))", WRITE.format(2), WRITE.format(33), NEW),
    of_world("status of a file", "os.stat(os.path.join(HOME, 'n')).st_size", WRITE.format(2), WRITE.format(33), NEW),
    of_world("whether it may be read", "2 if os.access(os.path.join(HOME, 'm'), os.R_OK) else 3", "",
             "pathlib.Path(HOME, 'm').touch()", NEW + "pathlib.Path(HOME, 'm').unlink(missing_ok=True)"),
    of_world("files of a folder", "len(os.listdir(HOME)) + 1", "", "pathlib.Path(HOME, 'k').touch()",
             NEW + "pathlib.Path(HOME, 'k').unlink(missing_ok=True)"),
    of_world("files of a folder by a scan", "len([*os.scandir(HOME)]) + 1", "", "pathlib.Path(HOME, 'k').touch()",
             NEW + "pathlib.Path(HOME, 'k').unlink(missing_ok=True)"),
    of_world("files of a pattern", "len([*pathlib.Path(HOME).glob('k*')]) + 1", "", "pathlib.Path(HOME, 'k').touch()",
             NEW + "pathlib.Path(HOME, 'k').unlink(missing_ok=True)"),
    of_world("the working directory", "len(os.getcwd())", "os.chdir('/')", "os.chdir('/tmp')", is_kept=True),
    of_world("the working directory as a path", "len(str(pathlib.Path.cwd()))", "os.chdir('/')", "os.chdir('/tmp')",
             is_kept=True),
    of_world("an absolute path", "len(os.path.abspath('a'))", "os.chdir('/')", "os.chdir('/tmp')", is_kept=True),
    of_world("what another process says", "float(subprocess.check_output(['cat', os.path.join(HOME, 'n')]))",
             WRITE.format(2), WRITE.format(3), NEW + "import subprocess"),
    of_world("what the shell says", "os.system(f'exit $(cat {HOME}/n)') / 256", WRITE.format(2), WRITE.format(3), NEW),
    of_world("random numbers", "random.random()", "random.seed(2)", "random.seed(3)", "import random"),
    of_world("random numbers of numpy", "np.random.rand()", "np.random.seed(2)", "np.random.seed(3)"),
]  # fmt: skip


def of_argument(name, arguments, now, use="x.sum()", **options) -> Change:
    source = f"""
def make():
    torch.manual_seed(0)
    return {arguments}


def step(x):
    return {use}
"""
    return of_source(name, "arguments", source, now, **options)


X = "torch.linspace(-1.0, 1.0, 16).reshape(4, 4)"
ASKS = "x * 2 if x.is_contiguous() else x * 3"
STRIDE = "x * 2 if x.stride(0) == 4 else x * 3"

ARGUMENTS = [
    of_argument("rows", f"{X},", "ARGS = ARGS[0][:2],", "x * x.shape[0]"),
    of_argument("columns", f"{X},", "ARGS = ARGS[0][:, :2].clone(),", "x * x.shape[1]"),
    of_argument("dims", f"{X},", "ARGS = ARGS[0][0],", "x * x.ndim"),
    of_argument("dtype of an argument", f"{X},", "ARGS = ARGS[0].double(),", "x * (2 if x.dtype == torch.float32 else 3)"),
    of_argument("a float", "2.0,", "ARGS = 3.0,", "torch.ones(2) * x"),
    of_argument("an int", "2,", "ARGS = 3,", "torch.ones(2) * x"),
    of_argument("a bool",  f"[True, {X}],", "ARGS[0][0] = False", "x[1] * (2 if x[0] else 3)"),
    of_argument("a text",  f"['a', {X}],", "ARGS[0][0] = 'b'", "x[1] * (2 if x[0] == 'a' else 3)"),
    of_argument("None", f"[None, {X}],", "ARGS[0][0] = torch.ones(4)", "x[1] * (2 if x[0] is None else 3)"),
    of_argument("a list", f"[{X}],", "ARGS = [ARGS[0][0]] * 2,", "sum(x) * len(x)"),
    of_argument("a tuple", f"[{X}],", "ARGS = tuple(ARGS[0]),", "x[0] * (2 if isinstance(x, list) else 3)"),
    of_argument("keys of a dict", f"{{'a': {X}}},", "ARGS = {'b': ARGS[0]['a']},", "sum(x.values()) * (2 if 'a' in x else 3)"),
    of_argument("an object", "types.SimpleNamespace(n=2.0),", "ARGS = types.SimpleNamespace(n=3.0),", "torch.ones(2) * x.n"),
    of_argument("whether it is contiguous", f"{X},", "ARGS = ARGS[0].t(),", ASKS),
    of_argument("whether another is contiguous", f"{X}.t(),", "ARGS = ARGS[0].t(),", ASKS, is_kept=False),
    of_argument("stride", f"{X},", "ARGS = ARGS[0].t(),", STRIDE),
    of_argument("strides", f"{X},", "ARGS = ARGS[0].t(),", "x * x.stride()[0]"),
    of_argument("strides of what is computed", f"{X},", "ARGS = ARGS[0].t(),", "x * 2 if (x + 1).is_contiguous() else x * 3"),
    of_argument("stride of a slice", f"{X},", "ARGS = torch.zeros(4, 8)[:, ::2].copy_(ARGS[0]),", STRIDE),
    of_argument("offset of a slice", f"{X},", "ARGS = torch.cat([ARGS[0]] * 2)[4:],", "x * (2 if x.storage_offset() == 0 else 3)",
                is_kept=False),
    of_argument("memory format", "torch.ones(2, 2, 2, 2),", "ARGS = ARGS[0].to(memory_format=torch.channels_last),",
                "x * (2 if x.is_contiguous(memory_format=torch.channels_last) else 3)"),
    of_source("strides of a parameter", "arguments", """
        def make():
            torch.manual_seed(0)
            return nn.Linear(4, 4), torch.ones(4, 4)
        def step(model, x):
            return model(x) * (2 if model.weight.is_contiguous() else 3)
        """, "ARGS[0].weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4).t())", between_calls=False),
    of_source("strides of a parameter in shards", "arguments", SHARDED + """

def make():
    torch.manual_seed(0)
    return nn.Linear(4, 4), torch.ones(4, 4)

def step(model, x):
    return model(x) * (2 if model.weight.stride(0) == 4 else 3)
""", "ARGS[0].weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4).t())", between_calls=False),
    of_source("strides of a buffer", "arguments", """
        def make():
            model = nn.Linear(4, 4)
            torch.manual_seed(0)
            model.register_buffer("b", torch.ones(4, 4))
            return model, torch.ones(4, 4)
        def step(model, x):
            return x * (2 if model.b.stride(0) == 4 else 3)
        """, "ARGS[0].b = torch.ones(4, 4).t()", between_calls=False),
]  # fmt: skip


def of_compiling(name, then, now, source=TRAIN, **options) -> Change:
    """Another way to compile the step: `HOW`."""
    return of_source(name, "settings", source, f"HOW = {now}", then=f"HOW = {then}", between_calls=False, **options)


SETTINGS = [
    of_compiling("placements of parameters", "{}", "{'params': {'up.weight': {'dp': spmd.Shard(0)}}}"),
    of_compiling("dim of a placement", "{'params': {'up.weight': {'dp': spmd.Shard(0)}}}",
                 "{'params': {'up.weight': {'dp': spmd.Shard(1)}}}"),
    of_compiling("placements of arguments", "{}", "{'inputs': {'x': {'dp': spmd.Shard(0)}}}"),
    of_compiling("fully sharded", "{}", "{'fully_shard': 'dp'}"),
    of_compiling("choice of placements", "{}", "{'choose': 'program'}"),
    of_compiling("buckets", "{}", "{'bucket_mb': None}"),
    of_compiling("passes", "{}", "{'passes': ()}"),
    of_compiling("placements of results", "{}", "{'outputs': {'result': {'dp': spmd.Replicate()}}}"),
    of_compiling("ranks", "{}", "{'ranks': 1}"),
    of_compiling("name of an axis", "{}", "{'axis': 'tp'}"),
]  # fmt: skip

ENVIRONMENT = [
    of_source("version of torch", "versions", TRAIN, "torch.__version__ = '0.0'", then="torch.__version__ = '0.1'",
              between_calls=False),
    of_source("sources of spmd", "versions", TRAIN,
              "import spmd.expand.kept.key as K; K.version_of_spmd = lambda: 'others'", between_calls=False),
]  # fmt: skip

CHANGES = [*VALUES, *CODE, *OPS, *MODELS, *OPTIMISERS, *FLAGS, *WORLD, *ARGUMENTS, *SETTINGS, *ENVIRONMENT]
