"""A page as a browser would find it."""

from html.parser import HTMLParser

VOID = {"br", "img", "hr", "input", "meta", "link"}


class Page(HTMLParser):
    """Tags in balance, text, headings, attributes, tables."""

    def __init__(self, html):
        super().__init__()
        self.html = html
        self.open = []
        self.seen = []
        self.texts = []
        self.tables = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "table":
            self.tables.append(Table())
        elif tag == "tr" and self.tables:
            self.tables[-1].rows.append([])
        elif tag in ("td", "th") and self.tables:
            self.tables[-1].rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))
        if "table" in self.open and "caption" in self.open:
            self.tables[-1].caption += data
        elif {"td", "th"} & set(self.open):
            self.tables[-1].rows[-1][-1] += data

    @property
    def text(self):
        return " ".join(" ".join(text for _, text in self.texts).split())

    def headings(self):
        return [tag for tag, _ in self.seen if tag in {"h1", "h2", "h3", "h4", "h5", "h6"}]

    def of(self, tag):
        return [text.strip() for at, text in self.texts if at == tag and text.strip()]

    def values(self, attribute):
        return [attributes[attribute] for _, attributes in self.seen if attribute in attributes]

    def table(self, caption):
        """The first one whose caption begins so."""
        return next(table for table in self.tables if table.caption.strip().startswith(caption))


class Table:
    def __init__(self):
        self.caption = ""
        self.rows = []

    def row(self, name):
        """The cells of the row that begins with a name, by their column."""
        heads, *rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        cells = next(row for row in rows if row[0].startswith(name))
        return dict(zip(heads[-len(cells) :] if len(cells) < len(heads) else heads, cells, strict=True))
