"""dropout: the published Philox vectors, the same bits from C++ and plain torch, masks that follow coordinates."""

import math

import pytest
import torch
from torch.library import opcheck

from megacore import _C
from megacore.ops import dropout, dropout_key, implementations, use
from megacore.ops.dropout import philox
from tests.oracle import DTYPES, offset_by_one, views

KEY = 0xFEDCBA9876543210
IMPLS = implementations("dropout", "cpu")  # "triton" too in the interpreter: tests/triton_kernels
PATHS = [impl for impl in [*IMPLS, "cpp-avx2", "cpp-portable"] if impl != "reference"]
OPERATORS = {"cpp": torch.ops.megacore.dropout, "triton": torch.ops.megacore.dropout_triton}


@pytest.fixture
def serving(request):
    """The implementation, named as in PATHS, serves dropout during the test."""
    name, _, isa = request.param.partition("-")
    if not _C.set_cpu_path(isa):
        pytest.skip(f"this machine has no {isa}")
    with use(name, "dropout"):
        yield name
    _C.set_cpu_path("")


def where(b, s, sample=3, position=5):
    return {"sample": torch.arange(sample, sample + b), "position": torch.arange(position, position + s)}


@pytest.mark.parametrize(
    ("counter", "key", "words"),  # kat_vectors of Random123, philox4x32-10
    [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    assert [w.item() for w in philox([torch.tensor(c) for c in counter], key)] == words


def scalar_draw(element, position, sample, key):
    """The definition at the head of csrc/cpu/dropout.cpp in Python's unbounded integers: a third writing."""
    m = 0xFFFFFFFF
    c, k = [element // 4 & m, position & m, sample & m, sample >> 32 & m], [key & m, key >> 32 & m]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b & m, a >> 32 ^ c[3] ^ k[1], a & m]
        k = [k[0] + 0x9E3779B9 & m, k[1] + 0xBB67AE85 & m]
    return c[element % 4]


@pytest.mark.parametrize("serving", [*PATHS, "reference"], indirect=True)
def test_mask_is_the_documented_one(serving):
    sample, position = torch.tensor([7, 2**41 + 9]), torch.tensor([[0, 2**31 + 1], [2**32 + 5, 3]])
    place = {"feature_start": 3, "features": 77, "group_start": 5}
    x = torch.ones(2, 3, 2, 70, dtype=torch.float64)
    y = dropout(x, 0.3, key=KEY, sample=sample, position=position, **place)
    for b, g, s, f in torch.cartesian_prod(*(torch.arange(n) for n in x.shape)).tolist():
        draw = scalar_draw((5 + g) * 77 + 3 + f, position[b, s].item(), sample[b].item(), KEY)
        assert y[b, g, s, f].item() == (1 / 0.7 if draw >= math.floor(0.3 * 2**32) else 0.0)


@pytest.mark.parametrize("serving", PATHS, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [1e-12, 0.1, 0.5, 1 - 2**-20])
def test_implementations_agree_bit_for_bit(dtype, p, serving):
    # 1023: a tile of the Triton kernel for the first group, and a little more for the second, which starts in lane 3
    tails = [(2, 3, 5, 67), (1, 2, 1, 1), (0, 2, 3), (2, 0, 3), (2, 3, 0), (1, 2, 1, 1023), (1, 2, 1, 1024)]
    for shape in [(1, 1, 1), (2, 3, 5), (3, 2, 131), *tails]:
        x = torch.randn(shape).to(dtype)
        place = {"feature_start": 2, "features": shape[-1] + 3, "group_start": 1}
        for at in (where(shape[0], shape[-2]), where(shape[0], shape[-2], 2**40 + 3, 2**32 - 1) | place):
            with use("reference", "dropout"):
                want = dropout(x, p, key=KEY, **at)
            assert torch.equal(dropout(x, p, key=KEY, **at), want)


@pytest.mark.parametrize("serving", PATHS, indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_sixteen_bit_value_is_rounded_as_torch_rounds(dtype, serving):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(4, 16, 1024)
    for p in (0.1, 2**-40):  # 2^-40 drops nothing and scales by 1: the value itself must come back
        y = dropout(x, p, key=1, **where(4, 16))
        kept = (x.float() * (1 / (1 - p))).to(dtype)
        mask = torch.ones(x.shape) if p < 0.1 else dropout(torch.ones(x.shape), p, key=1, **where(4, 16))
        torch.testing.assert_close(y, torch.where(mask > 0, kept, 0.0), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("features", [64, 61])  # 61: the lanes of a slice do not start at a multiple of four
def test_dropout_of_a_slice_is_the_slice_of_dropout(impl, features):
    b, g, s = 4, 6, 5
    x, at = torch.randn(b, g, s, features), where(b, s)
    with use(impl, "dropout"):
        whole = dropout(x, 0.4, key=KEY, **at)
        for rows, heads, span, cut in [
            (slice(1, 3), slice(0, g), slice(0, s), slice(0, features)),  # data parallel
            (slice(0, b), slice(2, 5), slice(0, s), slice(0, features)),  # heads over tensor parallel
            (slice(0, b), slice(0, g), slice(3, 5), slice(0, features)),  # sequence or context parallel
            (slice(0, b), slice(0, g), slice(0, s), slice(7, 40)),  # features over tensor parallel
            (slice(2, 4), slice(1, 2), slice(2, 3), slice(features - 1, features)),
        ]:
            part = dropout(
                x[rows, heads, span, cut],
                0.4,
                key=KEY,
                sample=at["sample"][rows],
                position=at["position"][span],
                feature_start=cut.start,
                features=features,
                group_start=heads.start,
            )
            assert torch.equal(part, whole[rows, heads, span, cut])
        shuffled = torch.randperm(b)  # a sample keeps its mask wherever it lies in the batch
        moved = at | {"sample": at["sample"][shuffled]}
        assert torch.equal(dropout(x[shuffled], 0.4, key=KEY, **moved), whole[shuffled])


@pytest.mark.parametrize("serving", PATHS[:-1], indirect=True)
def test_elements_beyond_two_to_the_31(serving):
    """MB-21: rows, then features, that lie so far apart; the memory is virtual, few pages of it are touched."""
    x, far = torch.randn(1, 3, 8).half(), torch.empty(2**31 + 64, dtype=torch.float16)
    for strides in ((0, 2**30, 1), (0, 1, 306783378)):
        distant = far.as_strided(x.shape, strides).copy_(x)
        got = OPERATORS[serving](distant, 0.5, 1, *where(1, 3).values(), 0, 8, 0)
        assert torch.equal(got, dropout(x, 0.5, key=1, **where(1, 3)))


@pytest.mark.parametrize("serving", PATHS[:-1], indirect=True)
def test_positions_per_row(serving):
    x, sample = torch.randn(2, 5, 33), torch.tensor([1, 2])
    position = torch.tensor([[4, 3, 2, 1, 0], [0, 1, 2, 3, 4]])
    y = dropout(x, 0.4, key=KEY, sample=sample, position=position)
    for row in range(2):
        one = dropout(x[row : row + 1], 0.4, key=KEY, sample=sample[row : row + 1], position=position[row])
        assert torch.equal(y[row : row + 1], one)
    assert torch.equal(dropout(x, 0.4, key=KEY, sample=sample, position=position.t().contiguous().t()), y)
    wide = torch.stack([sample, sample + 9], dim=1)[:, 0]  # stride 2
    assert torch.equal(dropout(x, 0.4, key=KEY, sample=wide, position=position), y)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate_and_independence(p):
    """Within 4 sigma: the rate, the agreement of masks that differ in one coordinate, and the mean of y."""
    shape, n = (4, 16, 1024), 4 * 16 * 1024
    x, at = torch.ones(shape), where(4, 16)
    y = dropout(x, p, key=KEY, **at)
    mask = y > 0
    assert abs(mask.float().mean().item() - (1 - p)) < 4 * (p * (1 - p) / n) ** 0.5
    agree = p * p + (1 - p) ** 2
    for key, change in [
        (KEY + 1, {}),
        (KEY ^ (1 << 40), {}),
        (KEY, {"sample": at["sample"] + 4}),
        (KEY, {"sample": at["sample"] + 2**32}),
        (KEY, {"position": at["position"] + 16}),
        (KEY, {"group_start": 1}),
        (KEY, {"feature_start": 1, "features": 1025}),
    ]:
        other = dropout(x, p, key=key, **(at | change)) > 0
        assert abs((mask == other).float().mean().item() - agree) < 4 * (agree * (1 - agree) / n) ** 0.5, (key, change)
    for shifted in (mask[:, :, 1:] == mask[:, :, :-1], mask[:, 1:] == mask[:, :-1], mask[1:] == mask[:-1]):
        assert abs(shifted.float().mean().item() - agree) < 4 * (agree * (1 - agree) / shifted.numel()) ** 0.5


def test_mb_14_masks_over_tensor_and_data_parallel():
    """(a) hidden dropout of [4, 2, 64] ones: equal over tensor parallel, different over data parallel."""
    ones, position = torch.ones(2, 4, 64), torch.arange(4)  # [B, S, F]
    key = dropout_key(1234, 7, "blocks.0.mlp.dropout")
    samples = torch.arange(4).split(2)  # of the two data-parallel ranks
    rank = [dropout(ones, 0.5, key=key, sample=s, position=position) for s in samples]
    assert torch.equal(rank[0], dropout(ones, 0.5, key=key, sample=samples[0].clone(), position=position.clone()))
    assert 0.3 < (rank[0] == rank[1]).float().mean() < 0.7


@pytest.mark.parametrize("impl", IMPLS)
def test_mb_14_backward_redraws_the_mask(impl):
    """(d) at the operator: x.grad equals y bitwise for ones, after other draws in between."""
    x = torch.ones(2, 4, 64, requires_grad=True)
    with use(impl, "dropout"):
        y = dropout(x, 0.5, key=KEY, **where(2, 4))
    dropout(torch.ones(2, 4, 64), 0.5, key=KEY + 1, **where(2, 4))
    y.sum().backward()
    assert torch.equal(x.grad, y)


def test_mb_14_no_generator_is_consumed_and_p_0_is_the_identity():
    """(f), and that a draw leaves torch's own generator alone."""
    x, before = torch.randn(2, 4, 64), torch.get_rng_state()
    assert dropout(x, 0.0, key=KEY, **where(2, 4)) is x
    dropout(x, 0.5, key=KEY, **where(2, 4))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("serving", PATHS[:-1], indirect=True)
def test_nothing_of_the_size_of_x_is_saved(serving):
    x, saved = torch.randn(2, 4, 64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        dropout(x, 0.5, key=KEY, **where(2, 4))
    assert sorted(saved) == [2, 4]


@pytest.mark.parametrize("serving", PATHS[:-1], indirect=True)
def test_views_give_the_bits_of_contiguous_copies(serving):
    """MB-23, upstream gradients included."""
    plain, at = torch.randn(6, 10), where(1, 6)
    upstream = torch.randn(6, 10)

    def both(x, dy):
        x = x.detach().unsqueeze(0).requires_grad_()
        y = dropout(x, 0.5, key=KEY, **at)
        return y.detach(), torch.autograd.grad(y, x, dy.unsqueeze(0))[0]

    want = both(plain, upstream)
    for what, view in (views(plain) | {"offset": offset_by_one(plain)}).items():
        assert all(map(torch.equal, both(view, upstream), want)), what
    for what, view in (views(upstream) | {"offset": offset_by_one(upstream)}).items():
        assert all(map(torch.equal, both(plain, view), want)), what
    row = torch.randn(10)
    assert all(map(torch.equal, both(row.expand(6, 10), row.expand(6, 10)), both(row.repeat(6, 1), row.repeat(6, 1))))
    heads = torch.randn(2, 5, 3, 8).transpose(1, 2)  # [B, S, G, F] seen as [B, G, S, F]
    want = dropout(heads.contiguous(), 0.5, key=1, **where(2, 5))
    assert torch.equal(dropout(heads, 0.5, key=1, **where(2, 5)), want)


def test_does_not_depend_on_the_number_of_threads():
    x, before, found = torch.randn(3, 700, 65), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(dropout(x, 0.1, key=KEY, **where(3, 700)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_key_is_stable_and_separates():
    # a change of this number changes every run with dropout
    assert dropout_key(1234, 0, "blocks.0.mlp.dropout") == 4226950760155678988
    keys = {dropout_key(s, t, m) for s in (0, 1, 11) for t in (0, 1, 11) for m in ("a", "b", "1", "11")}
    assert len(keys) == 36 and all(0 <= k < 2**64 for k in keys) and max(keys) >= 2**63


@pytest.mark.parametrize("serving", PATHS[:-1], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_and_gradcheck(dtype, serving):
    x, at = torch.randn(2, 2, 3, dtype=torch.float64), where(2, 2)
    arguments = (0.5, 3, at["sample"], at["position"], 1, 9, 0)
    opcheck(OPERATORS[serving].default, (x.to(dtype).requires_grad_(), *arguments))
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(lambda t: dropout(t, 0.5, key=3, **at), x.requires_grad_())
        assert torch.autograd.gradgradcheck(lambda t: dropout(t, 0.5, key=3, **at), x)


@pytest.mark.parametrize("serving", PATHS[:-1], indirect=True)
def test_compiles_once_for_all_steps(serving):
    """A new key each step must not compile anew each step."""
    frames = []

    def backend(graph, _):
        frames.append(graph)
        return graph

    compiled = torch.compile(lambda x, key, at: dropout(x, 0.5, key=key, **at), backend=backend, fullgraph=True)
    x, at = torch.randn(2, 4, 64), where(2, 4)
    for step in range(8):
        key = dropout_key(0, step, "m")
        assert torch.equal(compiled(x, key, at), dropout(x, 0.5, key=key, **at))
    assert len(frames) <= 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"p": 1.0}, ["p is 1", "0 <= p < 1"]),
        ({"p": -0.1}, ["p is -0.1", "0 <= p < 1"]),
        ({"x": torch.ones(4, 64)}, ["x", r"\[4, 64\]", r"\[B, S, F\]"]),
        ({"x": torch.ones(2, 4, 64, dtype=torch.int32)}, ["x", "int", "Float"]),
        ({"sample": torch.arange(3)}, ["sample", r"\[3\]", r"\[2\]"]),
        ({"sample": torch.zeros(2)}, ["sample", "Float", "Long|int64"]),
        ({"position": torch.arange(5)}, ["position", r"\[5\]", r"\[4\] or \[2, 4\]"]),
        ({"features": 63}, ["feature_start", "64 features", "features=63"]),
        ({"feature_start": 1}, ["feature_start is 1", "features=64"]),
        ({"group_start": -1}, ["group_start is -1", "0 or more"]),
        ({"features": 2**35}, ["features", r"2\^34"]),
        ({"sample": torch.arange(2, device="meta")}, ["sample", "meta", "cpu"]),
    ],
)
@pytest.mark.parametrize("impl", IMPLS)
def test_refusals_name_operator_argument_got_and_wanted(impl, change, words):
    call = {"x": torch.ones(2, 4, 64), "p": 0.5, "key": 1, **where(2, 4)} | change
    with use(impl, "dropout"), pytest.raises(ValueError, match="(?i)" + ".*".join(["dropout", *words])) as caught:
        dropout(call.pop("x"), call.pop("p"), **call)
    assert "\n" not in str(caught.value)
