# ruff: noqa: E501, SIM905 (texts)
"""Everyday prompts written by us: explanations, letters, advice, stories, rewriting. Owns texts only."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

_TOPICS = (
    "photosynthesis;black holes;inflation;the water cycle;vaccines;machine learning;climate change;the French Revolution;"
    "supply and demand;the human heart;electric cars;renewable energy;the stock market;jazz music;the Roman Empire;"
    "meditation;coffee;volcanoes;the internet;chess;sleep;democracy;the ocean;bees;honesty;space travel;vegetarian cooking;"
    "gravity;remote work;public libraries;social media;time zones;earthquakes;bread baking;the immune system;mountain hiking;"
    "budgeting;poetry;friendship;city planning;recycling;the moon;learning a language;running a small business;gardening"
).split(";")
_PEOPLE = (
    "a child;a beginner;a high school student;a busy manager;a new employee;a friend;a grandparent;a customer;a neighbour;"
    "a teacher;a colleague;a tourist"
).split(";")
_OCCASIONS = (
    "a job application;a delayed delivery;a birthday invitation;a meeting next week;a refund request;a farewell;"
    "a recommendation;a complaint about noise;a thank-you after an interview;a change of plans;a fundraising event;"
    "a team outing"
).split(";")
_SENTENCES = (
    "The meeting was moved because the room was already booked by another team.;Despite of the rain we was happy with the trip.;"
    "Our new product saves time, and it saves money, and it is easy to use.;She don't know where is the station.;"
    "The results of the study were surprising to many people who had expected otherwise.;I am writing to you to ask for help with my order."
).split(";")
_FORMS = (
    "Explain {t} to {p}.",
    "What are the main advantages and disadvantages of {t}?",
    "Write a short blog post about {t} for {p}.",
    "Give me ten tips about {t}.",
    "Write a poem about {t}.",
    "Summarise the most important facts about {t} in a few bullet points.",
    "Write a short story in which {t} plays a role and {p} is the main character.",
    "How did {t} change over the last hundred years?",
    "Write an email to {p} about {o}.",
    "Draft a polite letter for {o}. Keep it under 150 words.",
    "Rewrite this sentence so that it sounds more professional: {s}",
    "Correct the mistakes in this text and explain them: {s}",
    "Imagine you are {p}. How would you talk about {t}?",
    "Compare {t} and {u}.",
    "Create a lesson plan about {t} for {p}.",
    "What questions should {p} ask about {t}?",
    "Why is {t} important?",
    "Make a table of five facts about {t} and their explanations.",
    "Write a dialogue between {p} and an expert on {t}.",
    "Plan a weekend around {t} with a schedule for each day.",
    "Describe {t} in one paragraph, using vivid language.",
    "What are common mistakes that people make with {t}, and how can {p} avoid them?",
    "Suggest a title and an outline for an essay on {t}.",
    "Write a product description that connects {t} with everyday life.",
    "Convince {p} to learn about {t}.",
    "Classify these into groups and explain your choice: {t}, {u}, {v}.",
)


def chat_tasks(random: Random) -> Iterator[str]:
    """Endless."""
    while True:
        for form in random.sample(_FORMS, len(_FORMS)):
            t, u, v = random.sample(_TOPICS, 3)
            fields = {"p": random.choice(_PEOPLE), "o": random.choice(_OCCASIONS), "s": random.choice(_SENTENCES)}
            yield form.format(t=t, u=u, v=v, **fields)
