r"""References of every kind as data sets of mathematics have them, and other ways to write each.

Each entry is a reference and equivalents of it: what a model may put into its box.
"""

from __future__ import annotations

EQUIVALENTS: dict[str, tuple[str, ...]] = {
    # Numbers
    "42": ("42.0", "+42", r"42\,", "42.", r"\text{42}", r"\$42", "6 \\cdot 7", r"\frac{84}{2}"),
    "-7": ("-7.0", "{-7}", "- 7", r"-\frac{14}{2}", r"-\sqrt{49}"),
    "0": ("0.0", "-0", r"\frac{0}{5}", "3 - 3"),
    "1,200": ("1200", r"1{,}200", r"1,\!200", "1200.00", r"1.2 \times 10^3", r"\$1{,}200"),
    r"10,\!080": ("10080", "10,080", r"10{,}080"),
    "0.375": (r"\frac{3}{8}", ".375", "3/8", r"\dfrac38", "0.3750", r"37.5\%"),
    ".0000672": ("0.0000672", r"6.72 \times 10^{-5}", r"6.72 \cdot 10^{-5}"),
    "3.21": (r"\frac{321}{100}", "3.210", r"3\frac{21}{100}"),
    r"\$32,\!348": ("32348", r"\$32{,}348", "32,348", r"\$32348.00"),
    r"\$18.90": ("18.90", "18.9", r"\$18.9"),
    r"50\%": ("0.5", r"\frac{1}{2}", "50", r"50 \%", r"50\text{ percent}"),
    # Fractions
    r"\frac{14}{3}": (
        r"\dfrac{14}{3}",
        r"\tfrac{14}{3}",
        "14/3",
        r"4\frac{2}{3}",
        r"\frac{28}{6}",
        "4.666667",
        r"\frac {14} {3}",
        r"{14 \over 3}",
    ),
    "3/4": (r"\frac34", "0.75", r"\frac{3}{4}", "75/100"),
    r"\frac43": (r"\frac{4}{3}", "4/3", r"1\frac13"),
    r"\frac 59": (r"\frac{5}{9}", "5/9", r"\dfrac{5}{9}"),
    r"-\frac{35}{9}": (
        r"\frac{-35}{9}",
        "-35/9",
        r"\frac{35}{-9}",
        r"-\dfrac{35}{9}",
        r"-3\frac{8}{9}",
    ),
    r"1\frac{4}{5}": (r"\frac{9}{5}", "1.8", r"1 \frac 45", "9/5"),
    # Roots, pi, powers
    r"3\sqrt{13}": (
        r"\sqrt{117}",
        r"3 \sqrt{13}",
        r"3 \cdot \sqrt{13}",
        r"\sqrt{13} \cdot 3",
        r"3(13)^{1/2}",
    ),
    r"11\sqrt2": (r"11\sqrt{2}", r"\sqrt{242}", r"\frac{22}{\sqrt{2}}"),
    r"\frac{\sqrt{3}}{3}": (
        r"\frac{1}{\sqrt{3}}",
        r"\sqrt{3}/3",
        r"\dfrac{\sqrt 3}{3}",
        r"\sqrt{\frac{1}{3}}",
    ),
    r"1+2\sqrt{3}": (r"2\sqrt{3}+1", r"1 + \sqrt{12}", r"2\sqrt{3} + 1"),
    r"18+2\pi": (r"2\pi + 18", r"2(\pi + 9)", r"18 + 2 \cdot \pi"),
    r"-\frac{\pi}{6}": (r"-\pi/6", r"\frac{-\pi}{6}", r"-\frac{1}{6}\pi", r"-\dfrac{\pi}{6}"),
    r"\frac{20000}{\pi}": (r"20000/\pi", r"\dfrac{20000}{\pi}", r"\frac{20{,}000}{\pi}"),
    "10^{10}": ("10000000000", r"10{,}000{,}000{,}000", r"10^{5} \cdot 10^5"),
    "2^8": ("256", "4^4", r"2^{8}"),
    r"\sqrt[3]{5}": (r"5^{1/3}", r"5^{\frac{1}{3}}"),
    # Complex numbers
    "6 - 5i": ("-5i + 6", "6-5i", r"6 - 5 \cdot i", r"6 - 5\,i", r"6+(-5)i", r"6 - i5"),
    "1+274i": ("274i+1", r"1 + 274 i"),
    r"\frac{1}{2} + \frac{\sqrt{3}}{2}i": (
        r"\frac{1 + \sqrt{3}i}{2}",
        r"\frac{1}{2} + i\frac{\sqrt{3}}{2}",
        r"\frac{1 + i\sqrt{3}}{2}",
    ),
    # Expressions
    "2k+2": ("2k + 2", "2(k+1)", "2 + 2k", r"2\left(k+1\right)"),
    "p - q": ("-q + p", "p-q", "-(q - p)"),
    "(a+5)(b+2)": (
        "ab + 2a + 5b + 10",
        "(b+2)(a+5)",
        r"(5+a)\cdot(2+b)",
        r"\left(a+5\right)\left(b+2\right)",
    ),
    "x^3+3x-6": ("3x - 6 + x^3", r"x^{3} + 3x - 6", "-6 + 3x + x^3", "x(x^2+3) - 6"),
    r"\frac{11+9a}{20}": (
        r"\frac{9a+11}{20}",
        r"\frac{11}{20} + \frac{9a}{20}",
        "(9a + 11)/20",
        "0.55 + 0.45a",
    ),
    "6r^2-4r-24": ("2(3r^2 - 2r - 12)", "-24 - 4r + 6r^2"),
    "3R^2": (r"3 R^2", r"3 \cdot R^2", r"3R^{2}"),
    r"\cot x": (r"\cot(x)", r"\frac{\cos x}{\sin x}", r"\frac{1}{\tan x}", r"\cot{x}"),
    "8n^2 + 4n + 1": ("4n(2n+1) + 1", "1 + 4n + 8n^2", r"8 n^{2}+4 n+1"),
    r"e^{2x}": (r"(e^x)^2", r"e^{x} \cdot e^{x}", r"\exp(2x)"),
    r"\ln 2": (r"\ln(2)", r"\ln{2}"),
    # Equations
    "x=5": ("5", "x = 5", "5 = x", r"x = \frac{10}{2}"),
    "y = 2x + 3": ("y=3+2x", "2x + 3", "y - 2x = 3", "y = 2(x + 1.5)"),
    "5x - 7y + 11z + 4 = 0": ("5x-7y+11z+4=0", "5x - 7y + 11z = -4", "4 + 11z - 7y + 5x = 0"),
    "x^2 + y^2 = 9": ("y^2 + x^2 = 9", "x^2 + y^2 - 9 = 0", "9 = x^2 + y^2", "x^2 + y^2 = 3^2"),
    # Inequalities
    "x < 3": ("3 > x", "x<3", r"x \lt 3", r"(-\infty, 3)", r"x \in (-\infty, 3)"),
    r"x \ge -2": (r"x \geq -2", r"-2 \le x", r"[-2, \infty)", r"-2 \leqslant x"),
    r"1 < x \le 4": (r"4 \ge x > 1", r"(1, 4]", r"1<x\leq 4", r"x \in (1,4]"),
    # Intervals and unions
    "(3,4]": (r"\left(3,4\right]", "(3, 4]", r"(3, \frac{8}{2}]", r"x \in (3,4]", r"3 < x \le 4"),
    r"(-\infty, 0]": (r"\left(-\infty,0\right]", r"(-\infty,0]", r"x \le 0"),
    r"(2,\infty)": (r"(2, +\infty)", r"\left(2,\infty\right)", "x > 2"),
    r"x \in [-2,7]": ("[-2,7]", r"\left[-2, 7\right]", r"-2 \le x \le 7"),
    r"(-\infty, 2) \cup (3, \infty)": (
        r"(3, \infty) \cup (-\infty, 2)",
        r"(-\infty,2)\cup(3,\infty)",
        r"\left(-\infty,2\right) \cup \left(3,+\infty\right)",
    ),
    r"\left[ \frac{\pi^2}{8}, \frac{5 \pi^2}{4} \right]": (
        r"[\frac{\pi^2}{8}, \frac{5\pi^2}{4}]",
        r"\left[\dfrac{\pi^2}{8}, \dfrac{5\pi^2}{4}\right]",
        r"[\pi^2/8, 5\pi^2/4]",
    ),
    # Points and tuples
    r"\left( 3, \frac{\pi}{2} \right)": (
        r"(3, \frac{\pi}{2})",
        r"(3,\pi/2)",
        r"\left(3,\dfrac{\pi}{2}\right)",
    ),
    "(6,31,-1)": ("(6, 31, -1)", r"\left(6,31,-1\right)", "(6.0,31,-1)"),
    "(-2,1)": ("(-2, 1)", r"\left(-2,1\right)", "(-2.0, 1.0)"),
    r"\left( \frac{3}{2}, -13 \right)": ("(1.5, -13)", r"(\frac32,-13)", "(3/2, -13)"),
    # Sets and lists
    "1,-2": (
        "-2, 1",
        "1, -2",
        r"\{-2, 1\}",
        r"1 \text{ and } -2",
        r"-2 \text{ or } 1",
        "x = 1, x = -2",
    ),
    "3, 5, 7": ("7, 5, 3", "3,5,7", r"\{3,5,7\}", r"3, 5, \text{ and } 7"),
    r"1 \pm \sqrt{19}": (
        r"1 \mp \sqrt{19}",
        r"1+\sqrt{19}, 1-\sqrt{19}",
        r"1\pm\sqrt{19}",
        r"\{1-\sqrt{19}, 1+\sqrt{19}\}",
        r"x = 1 \pm \sqrt{19}",
    ),
    r"\{1\pm\sqrt{5},-2\}": (
        r"\{-2, 1\pm\sqrt{5}\}",
        r"-2, 1+\sqrt{5}, 1-\sqrt{5}",
        r"\left\{1+\sqrt{5},1-\sqrt{5},-2\right\}",
    ),
    # Matrices
    r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}": (
        r"\begin{pmatrix} -\frac{1}{3} \\ \frac{2}{3} \\ \frac{5}{3} \end{pmatrix}",
        r"\begin{bmatrix} -1/3 \\ 2/3 \\ 5/3 \end{bmatrix}",
        r"\begin{pmatrix}-1/3\\2/3\\5/3\end{pmatrix}",
        r"\frac{1}{3}\begin{pmatrix} -1 \\ 2 \\ 5 \end{pmatrix}",
    ),
    r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}": (
        r"\begin{bmatrix} -1 & 0 \\ 0 & -1 \end{bmatrix}",
        r"-\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}",
        r"\left(\begin{matrix} -1 & 0 \\ 0 & -1 \end{matrix}\right)",
    ),
    # With a unit, a degree, a base
    r"90^\circ": (r"90^{\circ}", "90", r"90 \text{ degrees}", r"90^\circ\text{}", "90°"),
    r"\frac{270}7\text{ degrees}": (
        r"\frac{270}{7}",
        r"\frac{270}{7}^\circ",
        r"\dfrac{270}{7}\text{ degrees}",
    ),
    r"864 \mbox{ inches}^2": ("864", r"864 \text{ in}^2", r"864\text{ square inches}"),
    r"5.4 \text{ cents}": ("5.4", r"5.4\text{ cents}", r"5.40 \text{ cents}"),
    "52_8": ("52_{8}", r"52_{\text{8}}", r"52_{(8)}"),
    "4210_{5}": ("4210_5", r"4210_{\text{five}}"),
    # Words and choices
    r"\text{Evelyn}": (
        "Evelyn",
        r"\textbf{Evelyn}",
        r"\mathrm{Evelyn}",
        r"\text{evelyn}",
        r"\text{ Evelyn }",
    ),
    r"\text{east}": ("east", "East", r"\text{East}"),
    r"\text{(C)}": ("C", "(C)", r"\text{C}", r"\textbf{(C)}", r"\mathrm{C}"),
    "Monday": (r"\text{Monday}", "monday", r"\textit{Monday}"),
    "no solution": (r"\text{no solution}", r"\text{No solution}"),
    # Text around a number, and delimiters of its own
    "18 dollars": ("18", r"\$18", r"18 \text{ dollars}"),
    "12 cm": ("12", r"12 \text{ cm}", "12.0"),
    "$x < 3$": ("x < 3", "3 > x"),
    r"\(2k+2\)": ("2(k+1)", "2 + 2k"),
    r"\boxed{\frac{1}{2}}": ("0.5", "1/2", r"\frac12"),
    r"$\frac{3}{4}$": ("0.75", "3/4"),
}

PAIRS = [(reference, other) for reference, others in EQUIVALENTS.items() for other in others]
