"""Worked exercises of the corpus: every number in them is computed here, with exact arithmetic where that is possible."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import combinations, pairwise
from math import comb, gcd, isqrt, sqrt

Draw = random.Random


def exercises() -> Iterator[tuple[str, str]]:
    """(name, text) of every exercise, one of a kind: two would share their words.

    Each kind has its own seed, so that a new one changes none of the others.
    """
    for kind in KINDS:
        yield kind.__name__.strip("_").replace("_", "-"), kind(Draw(f"{kind.__name__} 1"))


def _show(value: Fraction | int) -> str:
    value = Fraction(value)
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


def _signed(value: Fraction | int, unit: str = "") -> str:
    """A term after another one: `+ 3x`, `- x`."""
    size = "" if unit and abs(value) == 1 else _show(abs(Fraction(value)))
    return f"{'-' if value < 0 else '+'} {size}{unit}"


def _term(value: Fraction | int, unit: str) -> str:
    """A first term: `3x`, `-x`."""
    return f"{'-' if value < 0 else ''}{'' if abs(value) == 1 else _show(abs(Fraction(value)))}{unit}"


def _linear_system(draw: Draw) -> str:
    names = "xyz"
    while True:
        solution = [Fraction(draw.randint(-6, 6)) for _ in names]
        rows = [[Fraction(draw.choice([-4, -3, -2, -1, 1, 2, 3, 5])) for _ in names] for _ in names]
        rows[0][0] = Fraction(draw.choice([1, 2, 3]))
        for row in rows:
            row.append(sum((a * b for a, b in zip(row, solution, strict=True)), Fraction(0)))
        steps: list[str] = []
        work = [list(row) for row in rows]
        if _eliminate(work, steps):
            break
    lines = ["Solve the system of three linear equations by elimination and check the result.", ""]
    lines += [f"  ({i + 1})  {_equation(row, names)}" for i, row in enumerate(rows)]
    lines += ["", "Elimination. Each step names the row that is replaced.", "", *steps, ""]
    values = [Fraction(0)] * 3
    lines.append("Now the last equation has one unknown, and the others follow from below.")
    lines.append("")
    for i in (2, 1, 0):
        known = sum((work[i][j] * values[j] for j in range(i + 1, 3)), Fraction(0))
        values[i] = (work[i][3] - known) / work[i][i]
        shown = f"{_show(work[i][3])} {_signed(-known)}" if known else _show(work[i][3])
        lines.append(f"  {names[i]} = ({shown}) / ({_show(work[i][i])}) = {_show(values[i])}")
    lines += ["", "Check in the original equations:", ""]
    for i, row in enumerate(rows):
        product = " + ".join(f"({_show(a)})({_show(b)})" for a, b in zip(row, values, strict=False))
        lines.append(f"  ({i + 1})  {product} = {_show(row[3])}, as it should be.")
    determinant = _determinant([row[:3] for row in rows])
    lines += [
        "",
        f"The determinant of the coefficients is {_show(determinant)}. It is not zero, so there is no other solution. If "
        "one coefficient were known only to within a hundredth, the solution would move too, and by the more, the smaller "
        "the determinant is in comparison with the coefficients.",
    ]
    return "\n".join(lines) + "\n"


def _equation(row: list[Fraction], names: str) -> str:
    terms = [(value, name) for value, name in zip(row, names, strict=False) if value]
    first, *rest = terms
    return " ".join([_term(*first), *(_signed(*term) for term in rest)]) + f" = {_show(row[3])}"


def _eliminate(work: list[list[Fraction]], steps: list[str]) -> bool:
    for column in range(3):
        if not work[column][column]:
            return False
        for below in range(column + 1, 3):
            factor = work[below][column] / work[column][column]
            if not factor:
                continue
            work[below] = [b - factor * a for a, b in zip(work[column], work[below], strict=True)]
            shown = _equation(work[below], "xyz") if any(work[below][:3]) else ""
            if not shown:
                return False
            verb = "subtract" if factor > 0 else "add"
            where = "from" if factor > 0 else "to"
            steps.append(f"  {verb} {_show(abs(factor))} times row {column + 1} {where} row {below + 1}:  {shown}")
    return True


def _determinant(m: list[list[Fraction]]) -> Fraction:
    (a, b, c), (d, e, f), (g, h, i) = m
    return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)


def _euclid_and_inverse(draw: Draw) -> str:
    while True:
        modulus, number = draw.randint(700, 4000), draw.randint(150, 690)
        if gcd(modulus, number) == 1 and len(_quotients(modulus, number)) >= 6:
            break
    lines = [
        f"Find the inverse of {number} modulo {modulus}, that is the number x between 1 and {modulus - 1} for which "
        f"{number} x leaves the remainder 1 when it is divided by {modulus}.",
        "",
        f"An inverse exists only if {number} and {modulus} have no common divisor. Euclid's algorithm answers that, and on "
        "the way back it gives the inverse as well. Divide with remainder until the remainder is 0:",
        "",
    ]
    a, b = modulus, number
    chain = []
    while b:
        lines.append(f"  {a} = {a // b} * {b} + {a % b}")
        chain.append((a, b))
        a, b = b, a % b
    lines += ["", f"The last remainder that is not 0 is {a}, so the two are coprime and the inverse exists.", ""]
    lines.append("Now read the lines from below and express 1 by ever larger pairs of numbers.")
    lines.append("")
    s, t = 0, 1  # gcd = s * a + t * b of the last line
    for a, b in reversed(chain[:-1]):
        s, t = t, s - (a // b) * t
        lines.append(f"  1 = ({s}) * {a} + ({t}) * {b}")
    x = t % modulus
    lines += [
        "",
        f"The last line says that ({t}) * {number} differs from 1 by a multiple of {modulus}. "
        + (f"Add {modulus} to make it positive: x = {x}." if t < 0 else f"So x = {x}."),
        "",
        f"Check: {number} * {x} = {number * x} and {number * x} = {number * x // modulus} * {modulus} + 1.",
        "",
        "The same quotients, read from above, are the continued fraction of the ratio:",
        "",
        f"  {modulus}/{number} = [{'; '.join(map(str, _quotients(modulus, number)[:1]))}; "
        f"{', '.join(map(str, _quotients(modulus, number)[1:]))}]",
        "",
    ]
    h, k, h1, k1 = 1, 0, 0, 1
    for q in _quotients(modulus, number):
        h, h1, k, k1 = q * h + h1, h, q * k + k1, k
        gap = abs(Fraction(modulus, number) - Fraction(h, k))
        lines.append(f"  convergent {h}/{k}, off by {float(gap):.3g}")
    lines += [
        "",
        "Each convergent is closer to the ratio than any fraction with a smaller denominator, and they lie on either side "
        "of it in turn. The last but one has, up to its sign, the coefficients found above.",
    ]
    return "\n".join(lines) + "\n"


def _quotients(a: int, b: int) -> list[int]:
    found = []
    while b:
        found.append(a // b)
        a, b = b, a % b
    return found


def _loan_plan(draw: Draw) -> str:
    loan, years = draw.randrange(12, 40) * 1000, draw.choice([4, 5, 6])
    rate = Fraction(draw.choice([39, 42, 48, 54, 63]), 1000)
    factor = (1 + rate) ** years
    payment = float(loan * rate * factor / (factor - 1))
    rounded = round(payment, 2)
    lines = [
        f"Someone borrows {loan:,} at {float(rate):.1%} a year and wants to pay it back in {years} equal yearly instalments, "
        "each at the end of a year. How large is an instalment, and how much of it is interest?",
        "",
        "Let A be the instalment, L the loan and q = 1 + i the growth factor of a year. After one year the debt is L q - A, "
        "after two (L q - A) q - A, and after n years",
        "",
        "  L q^n - A (1 + q + q^2 + ... + q^(n-1)) = L q^n - A (q^n - 1) / (q - 1).",
        "",
        "This has to be 0, and therefore",
        "",
        "  A = L q^n (q - 1) / (q^n - 1).",
        "",
        f"With q = {1 + float(rate):.3f} and n = {years} we have q^n = {float(factor):.6f}, and A = {payment:.4f}, in practice "
        f"{rounded:,.2f}.",
        "",
        "  year |  debt before |  interest |  repaid |  debt after",
    ]
    debt, total = float(loan), 0.0
    for year in range(1, years + 1):
        interest = round(debt * float(rate), 2)
        paid = rounded if year < years else round(debt + interest, 2)
        after = round(debt + interest - paid, 2)
        lines.append(f"  {year:4} | {debt:12,.2f} | {interest:9,.2f} | {paid - interest:7,.2f} | {abs(after):11,.2f}")
        debt, total = abs(after), total + paid
    simple = loan * float(rate) * years
    lines += [
        "",
        f"The last instalment takes up what rounding left over. Altogether {total:,.2f} is paid, of which "
        f"{total - loan:,.2f} is interest. That is less than the {simple:,.2f} which {years} years of interest on the whole "
        "sum would cost, because the debt shrinks; it is a little more than half of it, because the debt shrinks slowly at "
        "first. Each year's repayment is q times that of the year before: what is saved in interest goes into repaying.",
        "",
        "Two checks. The repayments add up to the loan. And the instalments, each divided by q once for every year that one "
        "has to wait for it, add up to the loan as well:",
        "",
        "  "
        + " + ".join(f"{rounded / (1 + float(rate)) ** n:,.2f}" for n in range(1, years + 1))
        + f" = {sum(rounded / (1 + float(rate)) ** n for n in range(1, years + 1)):,.2f}",
    ]
    return "\n".join(lines) + "\n"


def _sample_statistics(draw: Draw) -> str:
    what, unit, centre, spread = draw.choice(
        [
            ("the time of a bus from the depot to the station", "minutes", 31, 4),
            ("the weight of a loaf from one oven", "grams", 754, 9),
            ("the height of the tide gauge at noon", "centimetres", 212, 17),
            ("the reaction time of one driver", "hundredths of a second", 64, 6),
        ]
    )
    n = draw.choice([9, 10, 11])
    values = [round(draw.gauss(centre, spread)) for _ in range(n)]
    mean = Fraction(sum(values), n)
    squares = [(value - mean) ** 2 for value in values]
    variance = sum(squares, Fraction(0)) / (n - 1)
    t = {9: 2.306, 10: 2.262, 11: 2.228}[n]
    deviation = sqrt(variance)
    half = t * deviation / sqrt(n)
    ordered = sorted(values)
    middle = Fraction(ordered[n // 2] + ordered[(n - 1) // 2], 2)
    lines = [
        f"Measured was {what}, in {unit}, on {n} days: {', '.join(map(str, values))}. Describe the sample, and say how well "
        "it determines the mean of all days.",
        "",
        f"Mean. The sum is {sum(values)}, so the mean is {sum(values)}/{n} = {float(mean):.3f}.",
        "",
        f"Median. In order the values are {', '.join(map(str, ordered))}; in the middle "
        + (
            f"stands {_show(middle)}."
            if n % 2
            else f"stand {ordered[n // 2 - 1]} and {ordered[n // 2]}, hence {float(middle)}."
        ),
        "",
        "Spread. The squares of the distances from the mean:",
        "",
    ]
    lines += [
        f"  ({value} - {float(mean):.3f})^2 = {float(square):.3f}"
        for value, square in zip(values, squares, strict=True)
    ]
    lines += [
        "",
        f"They add up to {float(sum(squares)):.3f}. Divided by n - 1 = {n - 1} this gives the variance {float(variance):.3f}, "
        f"and its root is the standard deviation, {deviation:.3f} {unit}. One divides by n - 1 because the distances were "
        "taken from the sample's own mean, to which the values are a little closer than to the true one.",
        "",
        f"Uncertainty of the mean. The standard error is {deviation:.3f} / sqrt({n}) = {deviation / sqrt(n):.3f}. With {n - 1} "
        f"degrees of freedom 95 % of Student's distribution lies within {t} of zero, so that the interval is",
        "",
        f"  {float(mean):.2f} +- {t} * {deviation / sqrt(n):.3f} = [{float(mean) - half:.2f}, {float(mean) + half:.2f}].",
        "",
        f"To halve its width one would need about four times as many days, {4 * n} instead of {n}. The interval says nothing "
        f"about a single day: for that the spread itself counts, and a new value lies with 95 % probability within "
        f"{t} * {deviation:.3f} * sqrt(1 + 1/{n}) = {t * deviation * sqrt(1 + 1 / n):.1f} of the mean, provided that the days "
        "do not depend on one another and their distribution has roughly the shape of a bell.",
    ]
    return "\n".join(lines) + "\n"


def _newton_root(draw: Draw) -> str:
    number = draw.choice([7, 11, 13, 19, 23, 29, 31, 43])
    start = isqrt(number)
    lines = [
        f"Compute the square root of {number} by hand to ten digits.",
        "",
        f"If x is too small, {number}/x is too large, and the other way round. The truth lies between the two, so take the "
        "mean of both as the next guess:",
        "",
        f"  x' = (x + {number}/x) / 2.",
        "",
        "With fractions, so that nothing is rounded:",
        "",
    ]
    x = Fraction(start)
    for _ in range(4):
        new = (x + number / x) / 2
        error = abs(float(new) - sqrt(number)) if new.denominator < 10**6 else None
        lines.append(f"  x = {_show(x)}  gives  x' = {_show(new)} = {float(new):.12f}")
        if error is not None and error > 1e-13:
            lines.append(f"      off by {error:.2e}")
        x = new
    root = sqrt(number)
    first = Fraction(start)
    second = (first + number / first) / 2
    lines += [
        "",
        f"The root is {root:.10f}. How fast does that go? Write x = r + e with the true root r. Then",
        "",
        "  x' = (r + e + r^2 / (r + e)) / 2 = r + e^2 / (2 (r + e)),",
        "",
        "as one sees by multiplying both sides by 2 (r + e). So the new error is the square of the old one, divided by 2x: "
        "the number of correct digits doubles with every step. It also shows that after the first step every guess is too "
        "large, since the square is positive.",
        "",
        f"Test it on the numbers. The first guess is off by {float(first) - root:.4f}. Its square divided by 2 * {start} is "
        f"{(float(first) - root) ** 2 / (2 * start):.6f}, and the second guess is indeed off by {float(second) - root:.6f}.",
        "",
        f"A by-product: numerator p and denominator q of each guess satisfy p^2 - {number} q^2 = a small number.",
        "",
    ]
    x = second
    for _ in range(2):
        p, q = x.numerator, x.denominator
        lines.append(f"  {p}^2 - {number} * {q}^2 = {p * p - number * q * q}")
        x = (x + number / x) / 2
    lines.append("")
    lines.append("Such pairs are worth knowing, since p/q is then as good an approximation as q allows.")
    return "\n".join(lines) + "\n"


def _two_by_two_eigenvalues(draw: Draw) -> str:
    while True:
        low, high = sorted(draw.sample([v for v in range(-5, 8) if v], 2))
        p, q = draw.randint(1, 3), draw.randint(1, 3)
        r, s = draw.randint(1, 3), -draw.randint(1, 3)
        det = p * s - q * r
        if det and abs(low) != abs(high) and gcd(p, q) == gcd(r, s) == 1:
            break
    u, v = (p, q), (r, s)  # eigenvectors of low and high
    f = Fraction
    a = [
        [f(low * u[0] * v[1] - high * v[0] * u[1], det), f((high - low) * u[0] * v[0], det)],
        [f((low - high) * u[1] * v[1], det), f(high * u[0] * v[1] - low * v[0] * u[1], det)],
    ]
    trace, determinant = a[0][0] + a[1][1], a[0][0] * a[1][1] - a[0][1] * a[1][0]
    power = draw.choice([5, 6])
    start = next(w for w in ((1, 3), (3, 1), (2, 3), (1, 4)) if all(w[0] * y != w[1] * x for x, y in (u, v)))
    c1 = f(start[0] * v[1] - start[1] * v[0], det)
    c2 = f(u[0] * start[1] - u[1] * start[0], det)
    result = [c1 * low**power * u[i] + c2 * high**power * v[i] for i in range(2)]
    lines = [
        f"The matrix A has the rows ({_show(a[0][0])}, {_show(a[0][1])}) and ({_show(a[1][0])}, {_show(a[1][1])}). Find its "
        f"eigenvalues and eigenvectors, and use them to compute A^{power} ({start[0]}, {start[1]}).",
        "",
        f"Eigenvalues. The trace is {_show(trace)} and the determinant {_show(determinant)}, so the characteristic polynomial "
        "is",
        "",
        f"  t^2 {_signed(-trace, 't') if trace else ''} {_signed(determinant)} = (t {_signed(-low)})(t {_signed(-high)}).".replace(
            "  ", "  ", 1
        ),
        "",
        f"Its roots are {low} and {high}. They add up to the trace and their product is the determinant, as they must.",
        "",
        "Eigenvectors. For each root t solve (A - t) w = 0; both rows say the same, so one is enough.",
        "",
    ]
    for root, w in ((low, u), (high, v)):
        lines.append(
            f"  t = {root}: the first row is ({_show(a[0][0] - root)}, {_show(a[0][1])}), solved by w = ({w[0]}, {w[1]})."
        )
        left = [a[i][0] * w[0] + a[i][1] * w[1] for i in range(2)]
        lines.append(f"     Check: A w = ({_show(left[0])}, {_show(left[1])}) = {root} * ({w[0]}, {w[1]}).")
    lines += [
        "",
        f"The power. Write ({start[0]}, {start[1]}) = a ({u[0]}, {u[1]}) + b ({v[0]}, {v[1]}). The two equations "
        f"{_term(u[0], 'a')} {_signed(v[0], 'b')} = {start[0]} and {_term(u[1], 'a')} {_signed(v[1], 'b')} = {start[1]} give a = {_show(c1)} and "
        f"b = {_show(c2)}. Each application of A multiplies the first part by {low} and the second by {high}, hence",
        "",
        f"  A^{power} ({start[0]}, {start[1]}) = {_show(c1)} * {low**power} * ({u[0]}, {u[1]}) + {_show(c2)} * {high**power} * "
        f"({v[0]}, {v[1]})",
        f"      = ({_show(result[0])}, {_show(result[1])}).",
        "",
        "Step by step it comes to the same:",
        "",
    ]
    w = [f(start[0]), f(start[1])]
    for n in range(1, power + 1):
        w = [a[0][0] * w[0] + a[0][1] * w[1], a[1][0] * w[0] + a[1][1] * w[1]]
        lines.append(f"  A^{n}: ({_show(w[0])}, {_show(w[1])})")
    big = max((low, high), key=abs)
    lines += [
        "",
        f"In the long run the eigenvalue of larger size, {big}, prevails: the direction of A^n w tends to that of its "
        f"eigenvector, and the error shrinks by the factor {abs(min((low, high), key=abs))}/{abs(big)} in each step.",
    ]
    return "\n".join(lines) + "\n"


def _urn_without_replacement(draw: Draw) -> str:
    red, blue, taken = draw.randint(5, 9), draw.randint(6, 12), draw.choice([4, 5])
    total = red + blue
    ways = comb(total, taken)
    odds = [Fraction(comb(red, k) * comb(blue, taken - k), ways) for k in range(taken + 1)]
    mean = sum((k * p for k, p in enumerate(odds)), Fraction(0))
    variance = sum(((k - mean) ** 2 * p for k, p in enumerate(odds)), Fraction(0))
    with_return = taken * Fraction(red, total) * Fraction(blue, total)
    lines = [
        f"An urn holds {red} red and {blue} blue balls. {taken} are drawn without being put back. How many of them are red?",
        "",
        f"All sets of {taken} balls are equally likely, and there are C({total}, {taken}) = {ways} of them. A set with k red "
        f"balls is made by choosing k of {red} and {taken} - k of {blue}. So",
        "",
        f"  P(k) = C({red}, k) C({blue}, {taken} - k) / {ways}.",
        "",
    ]
    for k, p in enumerate(odds):
        lines.append(
            f"  k = {k}:  {comb(red, k)} * {comb(blue, taken - k)} / {ways} = {comb(red, k) * comb(blue, taken - k)}/{ways}"
            f" = {float(p):.4f}"
        )
    at_least = sum(odds[2:], Fraction(0))
    lines += [
        "",
        f"The numerators add up to {sum(comb(red, k) * comb(blue, taken - k) for k in range(taken + 1))}, which is the number "
        "of all sets: a good check, and known as Vandermonde's identity.",
        "",
        f"At least two red ones: 1 - P(0) - P(1) = {_show(at_least)} = {float(at_least):.4f}.",
        "",
        f"Mean. From the table, the sum of k P(k) is {_show(mean)}. It can be had without the table. Each single draw is red "
        f"with probability {red}/{total}, the last one as well as the first, because nobody has told us what the others were. "
        f"Means add up whether or not the draws depend on one another: {taken} * {red}/{total} = {_show(mean)}.",
        "",
        f"Variance. From the table it is {_show(variance)} = {float(variance):.4f}. With replacement it would be {taken} * "
        f"{red}/{total} * {blue}/{total} = {_show(with_return)} = {float(with_return):.4f}. Without replacement the draws pull "
        "against each other, since a red ball now makes a red one later less likely; the variance is smaller by the factor "
        f"({total} - {taken})/({total} - 1) = {_show(variance / with_return)}.",
        "",
        f"Suppose that the first two balls were red. Then {red - 2} of the remaining {total - 2} are red, and the chance that "
        f"the third is red as well has fallen from {float(Fraction(red, total)):.3f} to "
        f"{float(Fraction(red - 2, total - 2)):.3f}. If all {total} balls are drawn there is nothing left to chance, and the "
        "factor is 0, as it should be.",
    ]
    return "\n".join(lines) + "\n"


def _shortest_path(draw: Draw) -> str:
    towns = draw.sample(["Ash", "Birk", "Cole", "Dorn", "Elms", "Fen", "Gill", "Holm"], 6)
    while True:
        roads = {pair: draw.randint(2, 14) for pair in combinations(towns, 2) if draw.random() < 0.6}
        far = dict.fromkeys(towns, 10**6) | {towns[0]: 0}
        steps = _dijkstra(towns, roads, far)
        if steps and len(_way_back(towns, roads, far, towns[-1])) >= 4:
            break
    target = towns[-1]
    lines = [
        f"Six towns are joined by roads of these lengths, in kilometres. What is the shortest way from {towns[0]} to {target}?",
        "",
    ]
    lines += [f"  {a} - {b}: {length}" for (a, b), length in roads.items()]
    lines += [
        "",
        f"Dijkstra's method keeps, for every town, the length of the best way from {towns[0]} that is known so far. At the "
        f"beginning that is 0 for {towns[0]} and unknown for the others. In each step take the town with the smallest length "
        "that has not been settled, settle it, and look whether going on from there improves its neighbours.",
        "",
    ]
    for number, (town, changed) in enumerate(steps, 1):
        said = "; ".join(
            f"{other} {'now' if old < 10**6 else 'becomes'} {new}" + (f" instead of {old}" if old < 10**6 else "")
            for other, old, new in changed
        )
        lines.append(f"  {number}. settle {town} at {far[town]}: {said or 'no neighbour improves'}.")
    way = _way_back(towns, roads, far, target)
    parts = [str(roads.get((a, b), roads.get((b, a)))) for a, b in pairwise(way)]
    lines += [
        "",
        f"To find the way itself go back from {target}: at each town take the neighbour whose length plus the road between "
        f"them is exactly the length here. That gives {' - '.join(way)}, and {' + '.join(parts)} = {far[target]} kilometres.",
        "",
        "Why is a town that has been settled never improved later? Any other way to it would have to leave the settled towns "
        "somewhere, and the first town outside is at least as far away as the one we have just settled. From there on the way "
        "can only get longer, because no road has a negative length. If there were such roads (think of a toll that is paid "
        "out to the driver) the argument would break down, and so would the method.",
        "",
        f"All lengths from {towns[0]}: " + ", ".join(f"{town} {far[town]}" for town in towns[1:]) + ".",
    ]
    return "\n".join(lines) + "\n"


def _dijkstra(
    towns: list[str], roads: dict[tuple[str, str], int], far: dict[str, int]
) -> list[tuple[str, list[tuple[str, int, int]]]]:
    left, steps = list(towns), []
    while left:
        town = min(left, key=lambda t: far[t])
        if far[town] >= 10**6:
            return []
        left.remove(town)
        changed = []
        for other in left:
            length = roads.get((town, other), roads.get((other, town)))
            if length is not None and far[town] + length < far[other]:
                changed.append((other, far[other], far[town] + length))
                far[other] = far[town] + length
        steps.append((town, changed))
    return steps


def _way_back(towns: list[str], roads: dict[tuple[str, str], int], far: dict[str, int], target: str) -> list[str]:
    way = [target]
    while way[0] != towns[0]:
        here = way[0]
        way.insert(
            0,
            next(
                town
                for town in towns
                if (road := roads.get((town, here), roads.get((here, town)))) is not None
                and far[town] + road == far[here]
            ),
        )
    return way


def _partial_fractions(draw: Draw) -> str:
    a, b, c = draw.sample(range(-4, 6), 3)
    A, B, C = (draw.choice([-5, -3, -2, -1, 1, 2, 3, 4]) for _ in range(3))
    # numerator of A/(x-a) + B/(x-b) + C/(x-c), by coefficients of x^2, x, 1
    p2 = A + B + C
    p1 = -A * (b + c) - B * (a + c) - C * (a + b)
    p0 = A * b * c + B * a * c + C * a * b
    top = [f"{_term(p2, 'x^2')}"] if p2 else []
    top += [_signed(p1, "x") if top else _term(p1, "x")] if p1 else []
    top += [_signed(p0)] if p0 and top else ([_show(p0)] if p0 else [])
    numerator = " ".join(top)
    d = [f"(x {_signed(-root)})" if root else "x" for root in (a, b, c)]
    lines = [
        f"Decompose ({numerator}) / ({' '.join(d)}) into partial fractions and find an antiderivative.",
        "",
        "The degree of the numerator is smaller than that of the denominator and the three factors are different, so there are "
        "numbers P, Q and R with",
        "",
        f"  ({numerator}) / ({' '.join(d)}) = P/{d[0]} + Q/{d[1]} + R/{d[2]}.",
        "",
        "Multiply by the denominator:",
        "",
        f"  {numerator} = P {d[1]} {d[2]} + Q {d[0]} {d[2]} + R {d[0]} {d[1]}.",
        "",
        "This holds for every x, so choose those for which two of the three terms vanish.",
        "",
    ]
    for name, root, others, value in (("P", a, (b, c), A), ("Q", b, (a, c), B), ("R", c, (a, b), C)):
        left = p2 * root * root + p1 * root + p0
        product = (root - others[0]) * (root - others[1])
        lines.append(
            f"  x = {root}: the left side is {left}, the right side {name} * ({root - others[0]}) * ({root - others[1]}) = "
            f"{product} {name}, hence {name} = {value}."
        )
    x = next(v for v in (2, 3, 7, -6) if v not in (a, b, c))
    whole = Fraction(p2 * x * x + p1 * x + p0, (x - a) * (x - b) * (x - c))
    parts = [Fraction(A, x - a), Fraction(B, x - b), Fraction(C, x - c)]
    lines += [
        "",
        f"Check with x = {x}. The left side is {_show(whole)}, the right side "
        + " + ".join(f"({_show(part)})" for part in parts)
        + f" = {_show(sum(parts, Fraction(0)))}.",
        "",
        "The antiderivative of 1/(x - r) is log|x - r|, so the whole has the antiderivative",
        "",
        f"  {_term(A, ' log|' + d[0].strip('()') + '|')} {_signed(B, ' log|' + d[1].strip('()') + '|')} "
        f"{_signed(C, ' log|' + d[2].strip('()') + '|')} + constant,",
        "",
        f"where the constant may differ on each of the intervals into which the poles {', '.join(map(str, sorted((a, b, c))))} "
        "divide the line. An integral over an interval that contains a pole does not exist, however harmless the difference "
        "of the logarithms at its ends may look.",
        "",
        f"For large x the function behaves like {_show(p2)}/x"
        + (", since P + Q + R is the coefficient of x^2." if p2 else ": as P + Q + R = 0 it falls faster than 1/x."),
    ]
    return "\n".join(lines).replace("  log", " log") + "\n"


def _number_bases(draw: Draw) -> str:
    number, base = draw.randint(2000, 9000), draw.choice([3, 5, 6, 7])
    numerator, denominator = draw.choice([(3, 7), (5, 11), (4, 13), (7, 12), (5, 9), (8, 15)])
    lines = [
        f"Write {number} in base {base}, and {numerator}/{denominator} as a fraction in base {base}.",
        "",
        f"The whole number. The last digit in base {base} is the remainder on division by {base}, the one before it is the "
        "remainder of the quotient, and so on.",
        "",
    ]
    digits: list[int] = []
    n = number
    while n:
        lines.append(f"  {n} = {base} * {n // base} + {n % base}")
        digits.insert(0, n % base)
        n //= base
    written = "".join(map(str, digits))
    powers = " + ".join(f"{d} * {base ** (len(digits) - 1 - i)}" for i, d in enumerate(digits) if d)
    lines += [
        "",
        f"Read from below: {number} is {written} in base {base}. Check: {powers} = {number}.",
        "",
        f"The fraction. Multiply by {base}; the whole part is the first digit behind the point, and the rest goes on.",
        "",
    ]
    rest, seen, places = Fraction(numerator, denominator), {}, []
    while rest and rest not in seen:
        seen[rest] = len(places)
        digit = int(rest * base)
        lines.append(f"  {base} * {_show(rest)} = {_show(rest * base)} = {digit} + {_show(rest * base - digit)}")
        places.append(digit)
        rest = rest * base - digit
    if rest:
        start = seen[rest]
        head, period = "".join(map(str, places[:start])), "".join(map(str, places[start:]))
        lines += [
            "",
            f"The remainder {_show(rest)} has been there before, so the digits repeat: 0.{head}({period}), with the part in "
            f"brackets for ever, a period of length {len(period)}.",
            "",
            "That it has to repeat is no accident. The remainders are multiples of "
            f"1/{denominator} smaller than 1, so there are at most {denominator} of them, and as soon as one returns "
            "everything that follows returns with it.",
        ]
        value = Fraction(int(period, base), base ** len(period) - 1) / base**start
        value += Fraction(int(head, base) if head else 0, base**start)
        lines += [
            "",
            f"Back again, as a check. The period read as a number in base {base} is {int(period, base)}, and a period of length "
            f"{len(period)} is that number over {base}^{len(period)} - 1 = {base ** len(period) - 1}"
            + (f", moved by {start} place{'s' if start > 1 else ''} and added to the digits before it" if start else "")
            + f": together {_show(value)}, which is what we began with.",
        ]
    else:
        lines += ["", f"The remainder is 0, so the fraction ends: 0.{''.join(map(str, places))} in base {base}."]
    lines += [
        "",
        f"Whether a fraction ends depends on the base alone: it does so if every prime that divides the denominator divides "
        f"the base. In base ten 1/{denominator} {'ends' if _ends(denominator, 10) else 'does not end'}, and in base {base} it "
        f"{'ends' if _ends(denominator, base) else 'does not end'}; in base {denominator} it would be written 0.1.",
    ]
    return "\n".join(lines) + "\n"


def _ends(denominator: int, base: int) -> bool:
    while (shared := gcd(denominator, base)) > 1:
        denominator //= shared
    return denominator == 1


KINDS: tuple[Callable[[Draw], str], ...] = (
    _linear_system,
    _euclid_and_inverse,
    _loan_plan,
    _sample_statistics,
    _newton_root,
    _two_by_two_eigenvalues,
    _urn_without_replacement,
    _shortest_path,
    _partial_fractions,
    _number_bases,
)
