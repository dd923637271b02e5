"""The command recipes: lists the configs that come with textmill."""

from __future__ import annotations

from textmill.where import recipe_names, recipes_folder


def recipes() -> None:
    """Print the name of each recipe and the first line of its file."""
    for name in recipe_names():
        first = (recipes_folder() / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0]
        print(f"{name:<14} {first.lstrip('# ')}")
    print("Try one with: textmill run NAME; its file is in", recipes_folder())
