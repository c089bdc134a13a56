"""From scores of formats to recipes: the order in which sites get wider formats."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtc.quant.recipe import FormatRecipe, recipe_named
from trtc.quant.site_format import FORMATS, TABLE_FORMATS, TABLES, site_of

Shapes = Mapping[str, tuple[int, int]]
"""Linear -> (out_features, in_features), and site of a table -> (vocab_size, hidden_size)."""
Scores = Mapping[tuple[str, str], float]
"""(site, name of a format) -> what the format costs there, in nats a token; 0 where absent."""


@dataclass(frozen=True)
class PathPoint:
    """A recipe of the path, with what it takes."""

    recipe: FormatRecipe
    bits: float
    """Of a weight, scales included, over all sites."""
    predicted: float
    """The sum of its scores."""


def recipe_path(shapes: Shapes, scores: Scores, formats: Sequence[str]) -> tuple[PathPoint, ...]:
    """Recipes from the narrowest to the widest, each by one site wider than the one before.

    Of all upgrades of one site, the one that lowers the score by most for a bit comes first; on
    ties, the first site. A site whose size a format cannot hold does not get it.

    Args:
        formats: names of those to choose from; one of them fits every site.
    """
    sizes = _sizes(shapes, formats)
    chosen = {site: min(fitting, key=lambda name: fitting[name]) for site, fitting in sizes.items()}
    weights = sum(rows * columns for rows, columns in shapes.values())
    points = []
    while True:
        bits = sum(sizes[site][name] for site, name in chosen.items())
        predicted = sum(scores.get((site, name), 0.0) for site, name in chosen.items())
        recipe = recipe_named(chosen)
        points.append(PathPoint(recipe, bits / weights, predicted))
        best = _best_upgrade(chosen, sizes, scores)
        if best is None:
            return tuple(points)
        site, name = best
        chosen[site] = name


def within_bits(
    path: Sequence[PathPoint], shapes: Shapes, scores: Scores, bits: float
) -> PathPoint:
    """The last recipe of a path that takes at most `bits` a weight, with upgrades that still fit.

    The narrowest one where none does.
    """
    fitting = [point for point in path if point.bits <= bits]
    if not fitting:
        return path[0]
    formats = list(dict.fromkeys(n for point in path for n in point.recipe.names.values()))
    sizes = _sizes(shapes, formats)
    weights = sum(rows * columns for rows, columns in shapes.values())
    chosen = fitting[-1].recipe.names
    while True:
        spare = bits * weights - sum(sizes[site][name] for site, name in chosen.items())
        best = _best_upgrade(chosen, sizes, scores, spare)
        if best is None:
            break
        chosen[best[0]] = best[1]
    taken = sum(sizes[site][name] for site, name in chosen.items())
    predicted = sum(scores.get((site, name), 0.0) for site, name in chosen.items())
    recipe = recipe_named(chosen)
    return PathPoint(recipe, taken / weights, predicted)


def _sizes(shapes: Shapes, formats: Sequence[str]) -> dict[str, dict[str, int]]:
    """Site -> format that fits all of it -> bits."""
    linears: dict[str, list[tuple[int, int]]] = {}
    for name, shape in shapes.items():
        linears.setdefault(site_of(name), []).append(shape)
    return {
        site: {
            name: sum(FORMATS[name].num_bits(*shape) for shape in members)
            for name in formats
            if (site not in TABLES or name in TABLE_FORMATS)
            and not any(FORMATS[name].why_not(*shape) for shape in members)
        }
        for site, members in linears.items()
    }


def _best_upgrade(
    chosen: Mapping[str, str],
    sizes: Mapping[str, Mapping[str, int]],
    scores: Scores,
    spare: float = float("inf"),
) -> tuple[str, str] | None:
    """(site, format) that gains most for a bit, of those that take at most `spare` bits more."""
    best, best_rate = None, 0.0
    for site, now in chosen.items():
        for name, size in sizes[site].items():
            more = size - sizes[site][now]
            gain = scores.get((site, now), 0.0) - scores.get((site, name), 0.0)
            if 0 < more <= spare and gain / more > best_rate:
                best, best_rate = (site, name), gain / more
    return best
