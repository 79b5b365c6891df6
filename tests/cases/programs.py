"""Functions that write to what they are given: what has gone wrong, somewhere, in compilers of graphs.

Each is paired with its inputs in `MUTATIONS` and `ALIASES`; the oracle is the function itself, run by eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ROWS, OTHERS = torch.tensor([3, 1, 0]), torch.tensor([0, 3, 5])
WIDE = ROWS.view(3, 1).expand(3, 6)
MUTATIONS: dict[str, tuple[Callable[..., Any], tuple[torch.Size | tuple[int, ...], ...]]] = {}


def writes(*shapes: tuple[int, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function; without shapes every argument is [6, 6]."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        count = fn.__code__.co_argcount
        MUTATIONS[fn.__name__] = (fn, shapes or ((6, 6),) * count)
        return fn

    return add


# -- a read before and a read after a write see different values ----------------------------------------


@writes()
def sin_then_write(x, y):
    a = torch.sin(x)
    x.copy_(y)
    return torch.add(x, a)


@writes()
def sin_then_write_through_a_view(x, y):
    a = torch.sin(x)
    x[0].mul_(2)
    return torch.add(x, a) + y


@writes()
def write_through_a_flat_view(x, y):
    v = x.view(-1)
    v[3:9] = y.view(-1)[3:9]
    return x * 1, v.sum()


@writes()
def write_through_two_overlapping_views(x):
    v, w = x[0:3], x[2:5]
    v.add_(w.clone())
    w.mul_(2)
    return v + w


@writes()
def write_through_out(x, y):
    a = torch.sin(x)
    torch.mul(x, y, out=x)
    return x + a


@writes()
def write_through_out_of_a_view(x, y):
    torch.add(x[0], y[0], out=x[1])
    return x.sum(0)


@writes()
def write_between_gate_and_up(x, gate, up):
    g = torch.nn.functional.silu(x @ gate)
    x.mul_(2)
    return g * (x @ up)


@writes()
def old_value_lives_on(x, y):
    old = x.clone()
    x.add_(y)
    return old, x * 2


@writes()
def old_view_lives_on(x):
    old = x[1:3].clone()
    x[1:3].mul_(2)
    return old


@writes()
def zero_after_use(x, y):
    total = x + y
    x.zero_()
    return total


@writes()
def twice(x, y):
    x.add_(y)
    a = x * 2
    x.mul_(a)
    return a


@writes()
def only_when_bigger(x, y):
    x.masked_fill_(x > 0, 0)
    y[y > 0] = 1
    return x * 1


@writes()
def transposed_write(x, y):
    x.t().copy_(y)
    return x @ y


@writes()
def chunked_writes(x):
    a, b = x.chunk(2, 1)
    a.mul_(b)
    b.add_(a)
    return x.sum()


# -- values that are another input's value --------------------------------------------------------------


@writes()
def take_the_old_source(dst, src):
    dst[:] = src[:]
    src.add_(1)
    return src


@writes()
def take_the_old_source_by_slices(dst, src):
    dst[0:, :] = src[0:, :]
    src.add_(1)
    return src


@writes()
def swap(x, y):
    t = x.clone()
    x.copy_(y)
    y.copy_(t)


@writes()
def swap_and_return(x, y):
    t = x.clone()
    x[:] = y
    y[:] = t
    return t


@writes()
def rotate_three(x, y, z):
    t = x.clone()
    x.copy_(y)
    y.copy_(z)
    z.copy_(t)
    return x + y


@writes()
def pass_down_the_line(x, y, z):
    x.copy_(y)
    y.copy_(z)
    z.copy_(x)


@writes()
def pass_down_then_add(x, y, z):
    z.copy_(y)
    y.copy_(x)
    x.add_(1)


@writes()
def take_a_view_of_the_old(x, y):
    y.copy_(x.t())
    x.zero_()


@writes()
def take_then_zero(x, y):
    x[0:3] = y[0:3]
    y.copy_(x)
    x.zero_()
    return y.sum()


@writes()
def cast_there_and_back(x, y):
    y.copy_(x.double().to(x.dtype))
    x.add_(1)


# -- a place that is read from and written to -----------------------------------------------------------


@writes()
def shift_down(x):
    x[1:] = x[:-1].clone()
    return x + 0


@writes()
def shift_up(x):
    x[:-1] = x[1:].clone()


@writes()
def shift_columns(x):
    x[:, 1:].add_(x[:, :-1].clone())
    return x * 1


@writes()
def flip(x):
    x.copy_(x.flip(0))


@writes()
def flip_and_add(x):
    x.copy_(x.flip(0) + 1)
    return x * 2


@writes()
def transpose_in_place(x):
    x.copy_(x.t().clone())


@writes()
def add_own_transpose(x):
    x.add_(x.t().clone())


@writes()
def rows_from_rows(x):
    x[ROWS] = x[OTHERS]


@writes()
def rows_from_flipped_rows(x):
    x[ROWS] = x.flip(0)[OTHERS] + x[0]


@writes()
def index_copy_from_itself(x):
    x.index_copy_(0, ROWS, x[OTHERS] + x[0])


@writes()
def scatter_from_itself(x):
    x.scatter_(0, WIDE, x[OTHERS])
    return x * 1


@writes()
def row_by_row(x):
    x[0] = x[1]
    x[1] = x[2]
    return x[0] + x[1]


@writes()
def diagonal_from_a_row(x):
    x.diagonal().copy_(x[0].clone())
    return x.sum()


@writes()
def product_in_place(x, y):
    x.copy_(x @ y)
    return y @ x


@writes((6, 6), (1, 6))
def roll_in_a_row(x, new):
    x.copy_(torch.cat([x[1:], new]))
    return x @ x


@writes((6, 6), (6,))
def roll_and_set_the_last(x, new):
    moved = torch.roll(x, -1, 0)
    moved[-1] = new
    x.copy_(moved)
    return moved * 2


@writes((6, 6), (6,))
def roll_zero_and_add(x, new):
    moved = torch.roll(x, -1, 0)
    moved[-1] = new
    x.zero_()
    x.add_(moved)
    return moved


# -- scatters whose result is not the last value of the input -------------------------------------------


@writes()
def slice_scatter_then_zero(x, y):
    z = torch.slice_scatter(x, y, 0, 0, 6)
    x.zero_()
    return z


@writes()
def slice_scatter_then_write(x, y):
    z = torch.slice_scatter(x, y[:2], 0, 1, 3)
    x.copy_(y)
    return z


@writes()
def slice_scatter_source_zeroed(x, y):
    z = torch.slice_scatter(x, y, 0, 0, 6)
    y.zero_()
    return z


@writes()
def slice_scatter_of_a_view_then_zero(x, y):
    z = torch.slice_scatter(x.t(), y[:2], 0, 1, 3)
    x.zero_()
    return z


@writes()
def select_scatter_then_write(x, y):
    z = torch.select_scatter(x, y[0], 0, 1)
    x.copy_(y)
    return z


@writes()
def index_copy_then_write(x, y):
    z = torch.index_copy(x, 0, ROWS, y[:3])
    x.copy_(y)
    return z


@writes()
def index_put_then_write(x, y):
    z = torch.index_put(x, [ROWS], y[:3])
    x.copy_(y)
    return z


@writes()
def index_put_then_scale(x, y):
    z = torch.index_put(x, [ROWS], y[:3])
    x.mul_(2)
    return z


@writes()
def diagonal_scatter_then_write(x, y):
    z = torch.diagonal_scatter(x, y[0])
    x.copy_(y)
    return z


@writes()
def scatter_then_zero(x, y):
    z = torch.scatter(x, 0, WIDE, y[:3])
    x.zero_()
    return z


@writes()
def copy_between_two_slices(x, y):
    x[0:2] = y[0:2]
    middle = x.clone()
    x[2:4] = y[2:4]
    return middle


@writes()
def copy_after_the_last_slice(x, y):
    x[0:2] = y[0:2]
    return x.clone()


@writes((6, 6), (3, 6))
def copy_between_two_puts(x, v):
    x[ROWS] = v
    middle = x.clone()
    x[OTHERS] = v + 1
    return middle


# -- caches: the plain case that has to stay plain ------------------------------------------------------


@writes((6, 6), (3, 6))
def cache_write(cache, new):
    cache.index_copy_(0, ROWS, new)
    return cache @ cache


@writes((6, 6), (3, 6))
def cache_write_and_read_before(cache, new):
    before = cache * 2
    cache.index_copy_(0, ROWS, new)
    return before, cache.sum(0)


@writes((6, 6), (6, 6), (3, 6))
def two_caches(k, v, new):
    k.index_copy_(0, ROWS, new)
    v.index_copy_(0, ROWS, new * 2)
    return torch.softmax(k @ k.t(), -1) @ v


@writes((6, 6), (3, 6), (1,))
def cache_and_counter(cache, new, seen):
    cache[ROWS] = new
    seen.add_(3)
    return cache * seen


@writes((6, 6), (3, 6))
def scatter_add_into(x, new):
    x.scatter_add_(0, WIDE, new)
    return x.sum(), new * 2


# -- no input is written --------------------------------------------------------------------------------


@writes()
def own_buffer(x):
    out = torch.zeros_like(x)
    out[0:3] = x[0:3]
    out[3:] = x[:3] * 2
    return out


@writes()
def own_buffer_shifted(x):
    out = x.clone()
    out[1:] = out[:-1].clone()
    return out, x * 1


@writes()
def own_copy_written_twice(x, y):
    out = x.clone()
    out.add_(y)
    middle = out.clone()
    out[0] = 0
    return middle, out


# -- results: which of them are views of what -----------------------------------------------------------

RESULTS: dict[str, Callable[..., Any]] = {}


def returns(fn: Callable[..., Any]) -> Callable[..., Any]:
    RESULTS[fn.__name__] = fn
    return fn


@returns
def the_input(x):
    return x


@returns
def the_input_twice(x):
    return x, x


@returns
def one_value_twice(x):
    y = x * 2
    return y, y, [y]


@returns
def views_of_the_input(x):
    return x[1], x.t(), x.view(-1), x.detach()


@returns
def views_of_one_another(x):
    y = x * 2
    return y, y[0], y.t()


@returns
def a_view_without_its_base(x):
    return (x * 2)[1:3].t()


@returns
def copies_of_the_input(x):
    return x.clone(), x.contiguous(), x + 0, x.reshape(-1)


@returns
def nothing(x):
    x * 2


@returns
def holes(x):
    return None, x * 2, None


@returns
def numbers(x):
    return x.shape[0], 2.5, True, x * x.shape[1], "text"


@returns
def nested(x):
    return {"a": [x * 2, (x + 1, None)], "b": {"c": x.sum()}}


@returns
def nothing_of_it_used(x):
    return torch.ones(3)


@returns
def updated(x):
    x.add_(1)
    return x


@returns
def row_of_the_updated(x):
    x.add_(1)
    return x[0]


@returns
def old_row_of_the_updated(x):
    row = x[0]
    x.add_(1)
    return row, x


@returns
def slices_of_the_updated(x):
    x[1:3] = 0
    return x[1:3], x.t()


@returns
def copies_of_the_updated(x):
    x.add_(1)
    return x.reshape(-1), x.contiguous(), x.clone()


@returns
def transpose_updated(x):
    x.t().add_(1)
    return x.t()


@returns
def chunk_of_the_updated(x):
    x.add_(1)
    a, b = x.chunk(2)
    return b, a * 1


@returns
def rows_of_two_updated(x, y):
    x.copy_(y)
    y.add_(1)
    return x[0], y[0]


@returns
def view_of_a_view_of_the_updated(x):
    x.add_(1)
    return x.view(-1)[2:8].view(2, 3)


@returns
def detached_and_unbound_of_the_updated(x):
    x.add_(1)
    return x.detach(), x.unbind(0)[1]


@returns
def detached_before_the_update(x):
    v = x.detach()
    x.mul_(2)
    return v


@returns
def updated_with_a_returned_value(x, y):
    z = y * 2
    x.copy_(z)
    return z, x
