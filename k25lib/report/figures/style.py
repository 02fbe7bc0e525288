"""One look for every figure: layout, axes, and one colour for a category wherever it appears."""

import math

# The order is the stacking order. Names are those of k25lib/trace/categories.toml (fine, operation, role) and idle.
CATEGORY_COLOURS = {
    "allreduce": "#72B7B2",
    "allreduce_nccl": "#72B7B2",
    "allreduce_custom": "#3A8F89",
    "other_comm": "#A8D5D1",
    "attention": "#4C78A8",
    "kv_cache": "#9ECAE9",
    "moe_gemm": "#F58518",
    "gemm": "#E45756",
    "other_gemm": "#E45756",
    "routing": "#54A24B",
    "moe_sum": "#88D27A",
    "silu_mul": "#B79A20",
    "norm": "#EECA3B",
    "rms_norm": "#EECA3B",
    "rope": "#D67195",
    "sampling": "#B279A2",
    "quant": "#FF9DA6",
    "dtype_cast": "#8C2D19",
    "memcpy": "#79706E",
    "fused_other": "#9D755D",
    "other": "#BAB0AC",
    "unknown": "#111111",
    "idle": "#E3E3E3",
}


def colour(category):
    """The category's colour (hex); an unlisted category gets the colour of `other`."""
    return CATEGORY_COLOURS.get(category, CATEGORY_COLOURS["other"])


def log_ticks(values):
    """Axis keywords for a logarithmic axis of `values`: 1, 2 and 5 of every decade, written out."""
    values = [value for value in values if value > 0]
    if not values:
        return {}
    decades = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    ticks = [tick for tick in ticks if min(values) / 2.5 <= tick <= max(values) * 2.5]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}


def layout(title, height_px=420, margin=None, **more):
    """Keywords for `Figure.update_layout`: white ground, the legend below the title and clear of it.

    margin: sides in px ("l", "r", "t", "b") that differ from the usual; more: other keywords, as they are.
    """
    return {
        "template": "plotly_white",
        "title": {
            "text": title,
            "x": 0,
            "xref": "paper",
            "y": 1,
            "yref": "container",
            "yanchor": "top",
            "pad": {"t": 12},
        },
        "font": {"size": 13},
        "margin": {"l": 70, "r": 40, "t": 90, "b": 60, **(margin or {})},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        "hovermode": "closest",
        "height": height_px,
        **more,
    }


def empty(figure, text="no row has a time: see the failures"):
    """The figure with nothing but a sentence in its middle."""
    return figure.add_annotation(
        text=text, showarrow=False, font={"size": 15}, x=0.5, y=0.5, xref="paper", yref="paper"
    )


def top_to_bottom(figure, names):
    """The figure with its y axis's categories in the order of `names`, the first on top, and room for long ones."""
    return figure.update_yaxes(categoryorder="array", categoryarray=list(names)[::-1], automargin=True)


def largest_first(frame, by, column):
    """The values of the column `by`, those with the largest sum of `column` first, as a list."""
    return list(frame.groupby(by)[column].sum().sort_values(ascending=False).index)
