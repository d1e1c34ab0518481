"""Loops over rows: embedding, norms with the residual sum before them, cross-entropy.

A call computes rows first ≤ i < last, or columns if its docstring specifies them.
"""

from __future__ import annotations

import numpy as np

from distgpt.core.cpu.compiling.jit import exp, get, inline, jit, largest, number, put


@jit
def embed(first, last, x, tokens, wte, wpe, positions):
    for i in range(first, last):
        xi = x[i]
        token_row = wte[tokens[i]]
        if wpe is None:
            for j in range(xi.shape[0]):
                xi[j] = token_row[j]  # same type, so no rounding
        else:
            position = wpe[i % wpe.shape[0] if positions is None else positions[i]]
            for j in range(xi.shape[0]):
                put(xi, j, get(token_row, j) + get(position, j))


@jit
def embed_backward(first, last, dwte, dwpe, dx, tokens, seq_len, positions):
    """Columns first … last. Every worker adds all rows in order, so sums do not depend on timing."""
    begin = dx.shape[1] - dwte.shape[1]
    for i in range(dx.shape[0]):
        dxi = dx[i, begin + first : begin + last]
        add_to(dwte[tokens[i], first:last], dxi)
        if dwpe is not None:
            position = i % seq_len if positions is None else positions[i]
            add_to(dwpe[position, first:last], dxi)


@jit
def add_embedding(first, last, x, tokens, w):
    begin = x.shape[1] - w.shape[1]
    for i in range(first, last):
        xi = x[i, begin:]
        row = w[tokens[i]]
        for j in range(row.shape[0]):
            put(xi, j, get(xi, j) + get(row, j))


@jit
def previous_tokens(first, last, out, tokens, seq_len, before, positions):
    for i in range(first, last):
        begins = i % seq_len == 0 if positions is None else positions[i] == 0
        if begins:
            out[i] = 0 if before is None else before[i // seq_len]
        else:
            out[i] = tokens[i - 1]


@inline
def add_to(total, x):
    for j in range(total.shape[0]):
        total[j] += get(x, j)


@jit
def add(first, last, y, a, b):
    """Elements first … last of flat arrays: y ← a + b."""
    yi, ai, bi = y[first:last], a[first:last], b[first:last]
    for i in range(yi.shape[0]):
        put(yi, i, get(ai, i) + get(bi, i))


@jit
def sum_rows(first, last, total, x, accumulate):
    """Columns first … last of total ← Σ x over its rows."""
    if not accumulate:
        total[first:last] = 0
    for i in range(x.shape[0]):
        add_to(total[first:last], x[i, first:last])


@jit
def add_norm(first, last, y, s, mean, rstd, x, r, w, b, eps):
    width = s.shape[1]
    real = rstd.dtype.type
    share = real(1.0 / width)
    for i in range(first, last):
        si, yi = s[i], y[i]
        if r is not None:
            xi, ri = x[i], r[i]
            for j in range(width):
                put(si, j, get(xi, j) + get(ri, j))
        mu = real(0)
        if mean is not None:
            for j in range(width):
                mu += get(si, j)
            mu *= share
            mean[i] = mu
        # Compute the squares in a separate pass, over a row in the cache: E[x²] - E[x]² would cancel.
        square = real(0)
        for j in range(width):
            square += (get(si, j) - mu) * (get(si, j) - mu)
        scale = real(1) / np.sqrt(square * share + real(eps))
        rstd[i] = scale
        for j in range(width):
            value = (get(si, j) - mu) * scale
            if w is not None:
                value *= get(w, j)
            if b is not None:
                value += get(b, j)
            put(yi, j, value)


@jit
def norm_backward(first, last, dx, y, dy, dres, s, mean, rstd, w, b):
    width = s.shape[1]
    real = rstd.dtype.type
    share = real(1.0 / width)
    for i in range(first, last):
        si, dyi, dxi = s[i], dy[i], dx[i]
        scale = rstd[i]
        mu = real(0)
        if mean is not None:
            mu = mean[i]
        along, total = real(0), real(0)
        for j in range(width):
            xhat = (get(si, j) - mu) * scale
            g = get(dyi, j)
            if w is not None:
                g *= get(w, j)
            along += g * xhat
            total += g
        if y is not None:
            yi = y[i]
            for j in range(width):
                value = (get(si, j) - mu) * scale
                if w is not None:
                    value *= get(w, j)
                if b is not None:
                    value += get(b, j)
                put(yi, j, value)
        along *= share
        total *= share
        if mean is None:
            total = real(0)
        for j in range(width):
            xhat = (get(si, j) - mu) * scale
            g = get(dyi, j)
            if w is not None:
                g *= get(w, j)
            gradient = scale * (g - total - xhat * along)
            if dres is not None:
                gradient += get(dres[i], j)
            put(dxi, j, gradient)


@jit
def norm_backward_weights(first, last, dw, db, dy, s, mean, rstd, accumulate):
    """Columns first … last. Every worker reads all rows and owns its part of dw."""
    real = rstd.dtype.type
    if not accumulate:
        dw[first:last] = real(0)
        if db is not None:
            db[first:last] = real(0)
    own = dw[first:last]
    for i in range(s.shape[0]):
        si, dyi = s[i, first:last], dy[i, first:last]
        scale = rstd[i]
        mu = real(0)
        if mean is not None:
            mu = mean[i]
        for j in range(own.shape[0]):
            own[j] += get(dyi, j) * (get(si, j) - mu) * scale
        if db is not None:
            add_to(db[first:last], dyi)


@jit
def cross_entropy(first, last, losses, targets, logits, scale, backward):
    """Rows first … last of a chunk: the loss and, if `backward`, dlogits in place of the logits."""
    for i in range(first, last):
        losses[i] = _cross_entropy(logits[i], targets[i], scale, backward)


@inline
def _cross_entropy(row, target, scale, backward):
    """-log softmax(row)[target]; if backward, row ← scale · (softmax(row) - onehot)."""
    real = row.dtype.type
    top = largest(row)
    hit = row[target]
    total = real(0)
    for j in range(row.shape[0]):
        e = exp(row[j] - top)
        row[j] = e
        total += e
    if backward:
        share = real(scale) / total
        for j in range(row.shape[0]):
            row[j] *= share
        row[target] -= real(scale)
    return top + np.log(total) - hit


@jit
def cross_entropy_bfloat16(first, last, losses, targets, logits, scale, backward):
    """Compute `cross_entropy` in bfloat16. Exponentials are not stored, to avoid rounding them twice."""
    for i in range(first, last):
        row, target = logits[i], targets[i]
        top = largest(row)
        hit = get(row, target)
        total = _sum_of_exponentials(row, top)
        losses[i] = top + np.log(total) - hit
        if backward:
            share = number(row, scale) / total
            for j in range(row.shape[0]):
                e = exp(get(row, j) - top)
                put(row, j, share * e)
            at_target = np.exp(hit - top) * share - number(row, scale)
            put(row, target, at_target)


@inline
def _sum_of_exponentials(row, top):
    total = number(row, 0)
    for j in range(row.shape[0]):
        total += exp(get(row, j) - top)
    return total


@jit
def rounded(first, last, out, x):
    """Elements first … last of out ← x, rounded to out's type."""
    round_to(out[first:last], x[first:last])


@inline
def round_to(out, x):
    for i in range(out.shape[0]):
        put(out, i, x[i])
