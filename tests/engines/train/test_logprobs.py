"""Chunked log-probs, entropy and their gradients against the plain formulas."""

import pytest
import torch

from engines.train.logprobs import Support, block_width, token_statistics, top_words


def inputs(tokens=13, size=6, words=17, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(words, size, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, words, (tokens,), generator=generator)
    return hidden.requires_grad_(True), weight.requires_grad_(True), labels


def plain(hidden, weight, labels, temperature):
    logits = (hidden @ weight.t()) / temperature
    table = logits.log_softmax(-1)
    probs = table.exp()
    return table.gather(-1, labels[:, None])[:, 0], -(probs * table).sum(-1), probs.square().sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 13, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_values_and_gradients_equal_the_plain_formula(chunk, temperature):
    hidden, weight, labels = inputs()
    got = token_statistics(
        hidden,
        weight,
        labels,
        temperature=temperature,
        chunk=chunk,
        entropy_gradient=True,
        squared=True,
    )
    want = plain(hidden, weight, labels, temperature)
    torch.testing.assert_close(got.logprobs, want[0])
    torch.testing.assert_close(got.entropy, want[1])
    torch.testing.assert_close(got.sum_pi_squared, want[2])
    up = torch.randn(2, 13, dtype=torch.float64)
    ours = torch.autograd.grad((up[0] * got.logprobs + up[1] * got.entropy).sum(), (hidden, weight))
    theirs = torch.autograd.grad((up[0] * want[0] + up[1] * want[1]).sum(), (hidden, weight))
    torch.testing.assert_close(ours, theirs)


def biased(words=17):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(words, generator=generator, dtype=torch.float64).requires_grad_(True)


def whole_head(hidden, weight, bias, scale, cap, temperature=1.0):
    logits = scale * (hidden @ weight.t() + (0 if bias is None else bias))
    logits = logits if cap is None else cap * (logits / cap).tanh()
    return (logits / temperature).log_softmax(-1)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    ("bias", "scale", "cap"),
    [
        (None, 0.125, None),
        (None, 1.0, 2.0),
        (biased(), 1.0, None),
        (biased(), 1.7, 1.5),
        (None, 16.0, 0.25),
    ],
)
def test_bias_scale_and_cap_equal_the_plain_formula(chunk, temperature, bias, scale, cap):
    hidden, weight, labels = inputs()
    words = torch.stack([torch.randperm(17)[:4] for _ in range(13)])
    got = token_statistics(
        *(hidden, weight, labels),
        temperature=temperature,
        chunk=chunk,
        entropy_gradient=True,
        squared=True,
        words=words,
        bias=bias,
        scale=scale,
        cap=cap,
    )
    table = whole_head(hidden, weight, bias, scale, cap, temperature)
    probs = table.exp()
    picked, entropy = table.gather(-1, labels[:, None])[:, 0], -(probs * table).sum(-1)
    tail = table.scatter(1, words, -torch.inf).logsumexp(-1, keepdim=True)
    bins = torch.cat([table.gather(1, words), tail], dim=-1)
    torch.testing.assert_close(got.logprobs, picked)
    torch.testing.assert_close(got.entropy, entropy)
    torch.testing.assert_close(got.bins, bins)
    torch.testing.assert_close(got.sum_pi_squared, probs.square().sum(-1))
    up, of_bins = torch.randn(2, 13, dtype=torch.float64), torch.randn(13, 5, dtype=torch.float64)
    ours = up[0] * got.logprobs + up[1] * got.entropy + (of_bins * got.bins).sum(-1)
    theirs = up[0] * picked + up[1] * entropy + (of_bins * bins).sum(-1)
    leaves = [hidden, weight] if bias is None else [hidden, weight, bias]
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(theirs.sum(), leaves)
    )


def drawn_from(labels, words=17, share=0.4):
    """Some words of each token, its label among them; every third token was drawn from all."""
    left = torch.rand(len(labels), words, generator=torch.Generator().manual_seed(2)) < share
    left.scatter_(1, labels[:, None], True)
    cut = torch.arange(len(labels)) % 3 != 0
    left = left | ~cut[:, None]
    numbers = torch.where(cut, cut.cumsum(0), 0)
    left_out = torch.arange(int(numbers.max()) + 1) % 2 == 0
    listed = (left != left_out[numbers][:, None])[cut]  # of every second set those left out
    sets, ids = listed.nonzero(as_tuple=True)
    return left, Support(numbers=numbers, sets=sets + 1, words=ids, left_out=left_out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("chunk", [1, 1000])
def test_words_that_cannot_be_leave_steep_gradients_finite(chunk, cap, dtype):
    hidden, weight, labels = inputs(dtype=dtype)
    left, support = drawn_from(labels)
    got = token_statistics(
        *(hidden, weight, labels), chunk=chunk, entropy_gradient=True, cap=cap, support=support
    )
    logits = hidden @ weight.t()
    logits = logits if cap is None else cap * (logits / cap).tanh()
    table = logits.masked_fill(~left, -torch.inf).log_softmax(-1)
    entropy = -(table.exp() * table.masked_fill(~left, 0)).sum(-1)
    slopes = torch.linspace(-1e4, 1e4, 13, dtype=dtype)
    ours = torch.autograd.grad((slopes * got.entropy).sum(), (hidden, weight))
    theirs = torch.autograd.grad((slopes * entropy).sum(), (hidden, weight))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0.1)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize(
    ("temperature", "bias", "cap"), [(1.0, None, None), (0.7, biased(), None), (1.3, None, 1.5)]
)
def test_among_some_words_they_are_the_plain_formula_without_the_others(
    chunk, temperature, bias, cap
):
    hidden, weight, labels = inputs()
    left, support = drawn_from(labels)
    got = token_statistics(
        *(hidden, weight, labels),
        temperature=temperature,
        chunk=chunk,
        entropy_gradient=True,
        squared=True,
        bias=bias,
        cap=cap,
        support=support,
    )
    logits = whole_head(hidden, weight, bias, 1.0, cap, temperature)
    table = logits.masked_fill(~left, -torch.inf).log_softmax(-1)
    probs = table.exp()
    picked = table.gather(-1, labels[:, None])[:, 0]
    entropy = -(probs * table.masked_fill(~left, 0)).sum(-1)
    torch.testing.assert_close(got.logprobs, picked)
    torch.testing.assert_close(got.entropy, entropy)
    torch.testing.assert_close(got.sum_pi_squared, probs.square().sum(-1))
    up = torch.randn(2, 13, dtype=torch.float64)
    leaves = [hidden, weight] if bias is None else [hidden, weight, bias]
    ours = torch.autograd.grad((up[0] * got.logprobs + up[1] * got.entropy).sum(), leaves)
    theirs = torch.autograd.grad((up[0] * picked + up[1] * entropy).sum(), leaves)
    torch.testing.assert_close(ours, theirs)


def test_the_words_of_a_part_of_the_tokens():
    hidden, weight, labels = inputs()
    _, support = drawn_from(labels)
    places = torch.tensor([12, 0, 5, 7])
    whole = token_statistics(hidden, weight, labels, support=support).logprobs
    part = token_statistics(hidden[places], weight, labels[places], support=support.at(places))
    torch.testing.assert_close(part.logprobs, whole[places])


@pytest.mark.parametrize("masked", [True, False])
def test_samples_of_a_part_of_the_words_have_the_gradient_of_what_they_earn(masked):
    """sum_w p(w) r(w) grad log pi(w) is the gradient of the mean reward under p, if pi is p.

    p: softmax over the words that top-p sampling leaves. With log pi of all words it is another.
    """
    hidden, weight, _ = inputs(tokens=1)
    left, reward = torch.arange(17) % 3 != 1, torch.linspace(-1, 1, 17, dtype=torch.float64)
    p = (hidden @ weight.t())[0].masked_fill(~left, -torch.inf).softmax(-1)
    exact = torch.autograd.grad((p * reward).sum(), (hidden, weight))
    words = left.nonzero()[:, 0]
    count = len(words)
    support = Support(
        numbers=torch.ones(count, dtype=torch.int64),
        sets=torch.ones(count, dtype=torch.int64),
        words=words,
        left_out=torch.tensor([True, False]),
    )
    hidden, weight, _ = inputs(tokens=1)
    logprobs = token_statistics(
        hidden.expand(count, -1), weight, words, support=support if masked else None
    ).logprobs
    earned = (p.detach()[words] * reward[words] * logprobs).sum()
    got = torch.autograd.grad(earned, (hidden, weight))
    close = all(torch.allclose(ours, theirs) for ours, theirs in zip(got, exact, strict=True))
    assert close == masked


def test_a_head_that_is_named_plain_is_the_plain_one_to_the_bit():
    plain_head, named = inputs(dtype=torch.float32), inputs(dtype=torch.float32)
    ours = token_statistics(*plain_head, temperature=0.7)
    theirs = token_statistics(*named, temperature=0.7, bias=None, scale=1.0, cap=None)
    assert ours.logprobs.equal(theirs.logprobs)
    ours.logprobs.sum().backward()
    theirs.logprobs.sum().backward()
    assert plain_head[0].grad.equal(named[0].grad)


def test_the_likeliest_words_are_those_with_the_bias():
    hidden, weight, _ = inputs()
    bias = biased() * 5
    logits = whole_head(hidden, weight, bias, 1.0, None)
    assert top_words(hidden, weight, 5, chunk=4, bias=bias).equal(logits.topk(5).indices)
    assert not top_words(hidden, weight, 5, chunk=4).equal(logits.topk(5).indices)


def test_entropy_has_no_gradient_unless_asked_for():
    got = token_statistics(*inputs())
    assert got.logprobs.requires_grad
    assert not got.entropy.requires_grad
    assert got.sum_pi_squared is None


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, labels = inputs()
    token_statistics(hidden, weight.detach(), labels, chunk=4).logprobs.sum().backward()
    assert hidden.grad is not None
    hidden2, weight2, _ = inputs()
    token_statistics(hidden2.detach(), weight2, labels, chunk=4).logprobs.sum().backward()
    torch.testing.assert_close(
        weight2.grad, torch.autograd.grad(plain(hidden2, weight2, labels, 1.0)[0].sum(), weight2)[0]
    )


def test_no_tokens():
    hidden, weight, _ = inputs(tokens=0)
    got = token_statistics(hidden, weight, torch.zeros(0, dtype=torch.long))
    got.logprobs.sum().backward()
    assert got.logprobs.shape == (0,)
    assert not weight.grad.any()


def test_large_logits_cost_no_digits():
    hidden, weight, labels = inputs(dtype=torch.float32)
    scaled = token_statistics(hidden * 60, weight, labels)
    exact = plain(hidden.double() * 60, weight.double(), labels, 1.0)
    torch.testing.assert_close(scaled.logprobs.double(), exact[0], rtol=1e-5, atol=2e-4)
    torch.testing.assert_close(scaled.entropy.double(), exact[1], rtol=1e-4, atol=1e-4)


def test_a_token_that_cannot_be_gives_no_nan():
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    weight = torch.tensor([[1.0, 0.0], [2.0, 0.0], [-float("inf"), 0.0]])
    got = token_statistics(
        hidden, weight.nan_to_num(neginf=-3e38), torch.tensor([0]), entropy_gradient=True
    )
    (got.logprobs + got.entropy).sum().backward()
    assert torch.isfinite(got.entropy).all()
    torch.testing.assert_close(
        got.logprobs, torch.tensor([1.0, 2.0]).log_softmax(-1)[:1], rtol=1e-6, atol=1e-6
    )


def test_bfloat16_sums_in_float32():
    hidden, weight, labels = inputs(tokens=40, dtype=torch.bfloat16)
    got = token_statistics(hidden, weight, labels, chunk=7)
    assert got.logprobs.dtype == torch.float32
    got.logprobs.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16
    logits = (hidden @ weight.t()).float()
    want = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(got.logprobs, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_bins_of_words_and_the_tail_equal_the_plain_formula(chunk, temperature):
    hidden, weight, labels = inputs()
    words = torch.stack([torch.randperm(17)[:4] for _ in range(13)])
    words[0, 0] = labels[0]  # the label may be one of the words
    words[0, 1:] = (labels[0] + torch.arange(1, 4)) % 17
    got = token_statistics(
        *(hidden, weight, labels), temperature=temperature, chunk=chunk, words=words
    )
    table = ((hidden @ weight.t()) / temperature).log_softmax(-1)
    tail = table.scatter(1, words, -torch.inf).logsumexp(-1, keepdim=True)
    bins = torch.cat([table.gather(1, words), tail], dim=-1)
    picked = table.gather(-1, labels[:, None])[:, 0]
    torch.testing.assert_close(got.bins, bins)
    torch.testing.assert_close(got.logprobs, picked)
    up, other = torch.randn(13, 5, dtype=torch.float64), torch.randn(13, dtype=torch.float64)
    losses = [
        (up * b).sum() + (other * p).sum() for b, p in ((got.bins, got.logprobs), (bins, picked))
    ]
    ours, theirs = (torch.autograd.grad(loss, (hidden, weight)) for loss in losses)
    torch.testing.assert_close(ours, theirs)


def test_a_small_tail_keeps_its_digits_and_an_empty_one_its_finite_gradient():
    weight = torch.eye(3)
    hidden = torch.tensor([[20.0, 0.0, 0.0], [200.0, 100.0, 0.0]], requires_grad=True)
    words = torch.tensor([[0, 1], [0, 1]])
    bins = token_statistics(hidden, weight, torch.zeros(2, dtype=torch.long), words=words).bins
    exact = hidden.detach().double().log_softmax(-1)[0, 2]
    assert float(bins[0, 2].detach()) == pytest.approx(
        float(exact), rel=1e-6
    )  # 1 - p_0 - p_1 would be 0
    bins.sum().backward()
    assert torch.isfinite(bins).all()
    assert torch.isfinite(hidden.grad).all()


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_the_likeliest_words_come_block_by_block(chunk):
    hidden, weight, _ = inputs()
    logits = hidden @ weight.t()
    assert top_words(hidden, weight, 5, chunk=chunk).equal(logits.topk(5).indices)
    found = top_words(hidden, weight, 5, chunk=chunk, among=9)
    assert found.equal(logits[:, :9].topk(5).indices)


def test_blocks_of_a_gpu_are_aligned() -> None:
    """Elsewhere too where only shapes are asked for: a meta tensor is not on a CPU."""

    def width(tokens: int, device: str) -> int:
        hidden, weight = (torch.empty(n, 4, device=device) for n in (tokens, 1000))
        return block_width(hidden, weight, chunk=512)

    assert [width(tokens, "meta") for tokens in (513, 1900, 10**5)] == [768, 256, 5]
    assert width(100, "meta") == 1000  # all of them are one block, whatever their number
    assert width(513, "cpu") == 998
