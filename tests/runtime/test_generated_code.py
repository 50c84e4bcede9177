"""What is deferred is read off generated code, and whatever reads a tensor in another way keeps it from that."""

from __future__ import annotations

import pytest

from poochplan.runtime.compiled.deferred_unpack import deferred_arguments

CODE = """
class Runner:
    def call(self, args):
        primals_1, mul, s0, tangents_1 = args
        args.clear()
        # mul in a comment
        assert_size_stride(mul, (4, 4), (4, 1), 'input')
        buf0 = torch.ops.poochplan.deferred_unpack.default(mul, tangents_1)
        buf1 = buf0
        cpp_fused_0(tangents_1, buf1, primals_1)
        del mul
        return (buf1, )

def get_args():
    return [primals_1, mul, s0, tangents_1]
"""


def test_an_argument_that_is_only_checked_handed_to_the_op_and_dropped_is_deferred() -> None:
    assert deferred_arguments(CODE) == {1}


@pytest.mark.parametrize(
    "line",
    [
        "cpp_fused_1(mul)",
        "buf2 = mul; del mul  # reuse",
        "buf2 = torch.ops.poochplan.deferred_unpack.default(mul, None)",
        "buf2 = torch.ops.poochplan.deferred_unpack.default(tangents_1, mul)",
        "extern_kernels.mm(reinterpret_tensor(mul, (4, 4), (1, 4), 0), buf1, out=buf2)",
    ],
)
def test_an_argument_that_anything_else_reads_does_not(line: str) -> None:
    assert deferred_arguments(CODE.replace("        del mul\n", f"        {line}\n")) == frozenset()


@pytest.mark.parametrize(
    "code",
    ["", CODE.replace("def call(self, args)", "def run(args)"), CODE.replace(" = args\n", " = other\n"), CODE + CODE],
    ids=["none", "no call", "no arguments", "two calls"],
)
def test_code_of_another_kind_lets_nothing_be_deferred(code: str) -> None:
    assert deferred_arguments(code) == frozenset()
