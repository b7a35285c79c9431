from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('catalog', '0011_sharing_a_device'),
    ]

    operations = [
        migrations.AddField(
            model_name='machine',
            name='others_bytes',
            field=models.JSONField(default=list),
        ),
    ]
