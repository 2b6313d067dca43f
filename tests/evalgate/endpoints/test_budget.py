"""Budgets."""

import pytest

from evalgate.endpoints.budget import Budget, Purse, Spending, Spent
from evalgate.errors import UsageError


def test_budgets_are_read():
    assert Budget.parse("requests=5") == Budget(5, None)
    assert Budget.parse("seconds=1.5, requests=2") == Budget(2, 1.5)
    for text in ("", "5", "requests=0", "requests=1.5", "seconds=-1", "requests=1,requests=2", "tokens=3"):
        with pytest.raises(UsageError):
            Budget.parse(text)


def test_spending_ends():
    now = [0.0]
    spending = Spending(Budget(5, 10.0), clock=lambda: now[0])
    assert spending.begin(3)
    assert not spending.begin(3)
    assert spending.begin(2)
    assert spending.requests == 5
    assert spending.begin(0)
    spending.give_back(1)
    now[0] = 10.0
    assert not spending.begin(0)
    assert spending.take(1)  # of a window that has begun
    assert not spending.take(1)


def test_a_purse_pays_from_what_was_set_aside_and_then_from_the_rest():
    spending = Spending(Budget(requests=4))
    assert spending.begin(2)
    purse = Purse(spending, 2)
    for _ in range(4):
        purse.pay()
    with pytest.raises(Spent):
        purse.pay()
    purse.put_back()
    assert spending.requests == 4
    purse.close()
    assert spending.requests == 3
    purse.pay()
    assert spending.requests == 4
