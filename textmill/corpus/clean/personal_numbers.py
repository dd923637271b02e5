"""Mask numbers that identify people: IP addresses, IBANs, payment cards and identity numbers.

A number is masked only if it is one: by its check digits, its date and its length. Presidio decides with a language
model, at a few kilobytes a second; python-stdnum checks numbers but does not find them, and is under the LGPL.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from datetime import date

_DIGITS = re.compile(r"\d")
_IPV4 = re.compile(r"(?<![\w.,-])(?:\d{1,3}\.){3}\d{1,3}(?![\w-]|[.,]\w)", re.ASCII)
_VERSION = re.compile(
    r"(?:v|ver|versions?|version[esn]*|release|rev|section|§|clause|sürüm\w*|버전|版本)[.:]? ?\Z", re.IGNORECASE
)
_IPV6 = re.compile(r"(?<![\w:.-])[23][0-9a-f]{3}(?::[0-9a-f]{0,4}){2,7}(?![\w:/]|\.\w)", re.ASCII | re.IGNORECASE)
_IBAN = re.compile(r"(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?: ?[A-Z0-9]){11,30}", re.ASCII)
_IBAN_LENGTHS = {
    entry[:2]: int(entry[2:])
    for entry in (
        "AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DK18 DO28 EE20 EG29 ES24 FI18 "
        "FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32 LI21 LT20 "
        "LU20 LV21 LY25 MC27 MD24 ME22 MK19 MR27 MT31 MU30 NL18 NO15 PK24 PL28 PS29 PT25 QA29 RO24 RS22 SA24 SC31 SD18 "
        "SE24 SI19 SK24 SM27 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20"
    ).split()
}
_CARD = re.compile(
    r"(?<![\w.,+/-])(?:\d{4}([ -]?)\d{4}\1\d{4}\1\d{1,7}|3[47]\d{2}([ -]?)\d{6}\2\d{5}|3[068]\d{2}([ -]?)\d{6}\3\d{4})"
    r"(?![\w/-]|[.,]\d)",
    re.ASCII,
)
_CARD_BRANDS = re.compile(  # Visa, Mastercard, American Express, Diners, Discover, JCB, UnionPay, Mir, Troy
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}"
    r"|3(?:0[0-5]|[68]\d)\d{11}|6(?:011|4[4-9]\d|5\d\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}|62\d{14,17}|220[0-4]\d{12}"
    r"|9792\d{12}"
)
_IDENTITY = re.compile(
    r"(?<![\w.,+/-])(?:"
    r"(?P<korean>\d{6}-[1-8]\d{6})"
    r"|(?P<chinese>[1-8]\d{16}[\dXx])"
    r"|(?P<turkish>[1-9]\d{10})"
    r"|(?P<american>(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4})"
    r"|(?P<brazilian>\d{3}\.\d{3}\.\d{3}-\d{2})"
    r"|(?P<spanish>\d{8}-?[A-HJ-NP-TV-Z])"
    r")(?![\w/-]|[.,]\d)",
    re.ASCII,
)


def mask_ips(text: str) -> str:
    """Replace public IP addresses with [ip]; private and reserved ones identify nobody."""
    if text.count(".") >= 3:
        text = _IPV4.sub(_mask_ipv4, text)
    return _IPV6.sub(lambda found: "[ip]" if _is_public(found[0]) else found[0], text) if text.count(":") >= 2 else text


def _mask_ipv4(found: re.Match[str]) -> str:
    """Numbers of versions and sections have four parts too: they follow such a word, end with 0, which no address of a
    computer does, or all parts are below 10."""
    address = found[0]
    is_number = (
        address.endswith(".0")
        or max(map(int, address.split("."))) < 10
        or _VERSION.search(found.string[: found.start()][-12:])
    )
    return address if is_number or not _is_public(address) else "[ip]"


def _is_public(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.is_global and not found.is_multicast


def mask_ibans(text: str) -> str:
    """Replace IBANs with [iban]."""
    return _IBAN.sub(_mask_iban, text)


def _mask_iban(found: re.Match[str]) -> str:
    length = _IBAN_LENGTHS.get(found[0][:2])
    if length is None:
        return found[0]
    places = [place for place, character in enumerate(found[0], 1) if character != " "]
    size = len(places)
    end = places[min(size, length) - 1]
    rest = found[0][end:]
    number = found[0][:end].replace(" ", "")
    following = rest or found.string[found.end() : found.end() + 1]
    if size < length or following[:1].isalnum():
        return found[0]
    digits = "".join(str(int(character, 36)) for character in number[4:] + number[:4])
    return "[iban]" + rest if int(digits) % 97 == 1 else found[0]


def mask_cards(text: str) -> str:
    """Replace the numbers of payment cards with [card]: those of a known brand whose check digit is right."""
    return _CARD.sub(lambda found: "[card]" if _is_card(re.sub("[ -]", "", found[0])) else found[0], text)


def _is_card(number: str) -> bool:
    return _CARD_BRANDS.fullmatch(number) is not None and len(set(number)) > 1 and _luhn(number)


def _luhn(number: str) -> bool:
    doubled = (sum(divmod(2 * int(digit), 10)) for digit in number[-2::-2])
    return (sum(doubled) + sum(map(int, number[-1::-2]))) % 10 == 0


def mask_identity_numbers(text: str) -> str:
    """Replace identity numbers with [identity]: Korean, Chinese, Turkish, American, Brazilian and Spanish ones."""
    return _IDENTITY.sub(lambda found: "[identity]" if _CHECKS[found.lastgroup or ""](found[0]) else found[0], text)


def _is_korean(number: str) -> bool:
    """The last digit is a check digit in numbers of Koreans born before 2000; later ones may have a random one."""
    digits = [int(digit) for digit in number if digit != "-"]
    if not _is_date(("19", "19", "20", "20")[(digits[6] - 1) % 4] + number[:6]):
        return False
    total = sum(weight * digit for weight, digit in zip((2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5), digits, strict=False))
    return digits[6] > 2 or (11 - total % 11) % 10 == digits[12]


def _is_chinese(number: str) -> bool:
    total = sum(pow(2, 17 - place, 11) * int(digit) for place, digit in enumerate(number[:17]))
    return _is_date(number[6:14]) and "10X98765432"[total % 11] == number[17].upper()


def _is_turkish(number: str) -> bool:
    digits = [int(digit) for digit in number]
    tenth = (7 * sum(digits[0:9:2]) - sum(digits[1:8:2])) % 10
    return digits[9] == tenth and digits[10] == sum(digits[:10]) % 10


def _is_brazilian(number: str) -> bool:
    digits = [int(digit) for digit in _DIGITS.findall(number)]
    for size in (9, 10):
        total = sum((size + 1 - place) * digits[place] for place in range(size))
        if total * 10 % 11 % 10 != digits[size]:
            return False
    return len(set(digits)) > 1


def _is_spanish(number: str) -> bool:
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number[:8]) % 23] == number[-1]


def _is_date(digits: str) -> bool:
    try:
        return date(int(digits[:4]), int(digits[4:6]), int(digits[6:])) <= date(2100, 1, 1)
    except ValueError:
        return False


_CHECKS: dict[str, Callable[[str], bool]] = {
    "korean": _is_korean,
    "chinese": _is_chinese,
    "turkish": _is_turkish,
    "american": lambda number: True,  # it has no check digit
    "brazilian": _is_brazilian,
    "spanish": _is_spanish,
}
