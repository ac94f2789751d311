"""Text, HTML and pictures of what there is to see: bounded in size and time, whatever the number of shards."""

from lazyshards.display.html import bundle_html, dataset_html, panel, plan_html, table_html
from lazyshards.display.picture import plan_svg
from lazyshards.display.shards import shards_text
from lazyshards.display.text import dataset_text, plan_text, title_text
from lazyshards.display.words import (
    count_text,
    folded,
    hide_secrets,
    plural,
    printable,
    rate_text,
    seconds_text,
    size_text,
)

__all__ = [
    "bundle_html",
    "count_text",
    "dataset_html",
    "dataset_text",
    "folded",
    "hide_secrets",
    "panel",
    "plan_html",
    "plan_svg",
    "plan_text",
    "plural",
    "printable",
    "rate_text",
    "seconds_text",
    "shards_text",
    "size_text",
    "table_html",
    "title_text",
]
