"""Which of the known words was meant."""

from __future__ import annotations

from anabranch.core.spelling import did_you_mean

WORDS = ("learning_rate", "local_steps", "seed")


def test_the_nearest_word_is_asked_for() -> None:
    assert did_you_mean("sed", WORDS) == "did you mean 'seed'?"
    assert did_you_mean("learning_rat", iter(WORDS)) == "did you mean 'learning_rate'?"


def test_nothing_is_asked_where_no_word_is_like_it() -> None:
    assert did_you_mean("zzz", WORDS) == did_you_mean("sed", ()) == ""


def test_a_likeness_lets_words_in_or_keeps_them_out() -> None:
    assert did_you_mean("steps", WORDS, likeness=0.4) == "did you mean 'local_steps'?"
    assert did_you_mean("steps", WORDS, likeness=0.7) == ""


def test_initials_are_the_word_they_stand_for() -> None:
    settings = ["client.merge", "client.learning_rate", "server.lease_rule"]
    assert did_you_mean("client.lr", settings) == "did you mean 'client.learning_rate'?"
    assert did_you_mean("lr", WORDS) == "did you mean 'learning_rate'?"
    assert did_you_mean("s", WORDS) == "", "a letter stands for nothing"
